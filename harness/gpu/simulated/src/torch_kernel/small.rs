//! Computes operations on small tensors if the other values are not computed ([`Values::Copies`]):
//! what a program branches on is often one number.
//!
//! The Python module `small_values` describes operations. Their kernels for the GPU are replaced by
//! [`run`], which reads the arguments' known bytes, calls the GPU's kernel, calls the CPU's on
//! tensors with these bytes, and stores the results. If an argument is large or not known, the
//! results are not known either. For operations on large tensors alone, it only calls the GPU's
//! kernel. `unboxed` does the same for calls that pass arguments as C++ does.
//!
//! [`Values::Copies`]: harness_gpu_settings::settings::Values::Copies

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::{arch::global_asm, cell::Cell, cell::RefCell, mem, ptr, slice};

use super::{
    CPU, DOUBLE, Function, Handle, INT, KNOWN, Known, List, NONE, Signature, Stack, TENSOR, Value,
    Values,
};
use super::{counts, element_size, get, list_of, release};
use crate::copied::{self, Kept, may_know_any};
use crate::world::{State, is_device_memory, machine};
use crate::{contents, reads};

mod choice;
mod direct;
mod drawn;
mod unboxed;

use choice::{Choice, Rows};
use direct::{Direct, Number};
use drawn::{Drawing, Draws};
use unboxed::Functions;

const MOST_ELEMENTS: u64 = 64;
/// The most elements of a tensor that repeats few.
const MOST_REPEATED: u64 = 1 << 16;
const MOST_DIMENSIONS: usize = 8;
/// Slots of the table of operations: a power of two.
const SLOTS: usize = 1 << 12;
/// Signatures of an operation that the CPU has refused.
const MOST_REFUSED: usize = 8;
/// Tensors of the CPU that a thread keeps for later operations, of one type and shape.
const MOST_SPARE: usize = 8;
const MOST_SHAPES: usize = 256;

/// An operation, as `small_values` describes it.
#[repr(C)]
struct Description {
    names: [*const c_char; 2],
    arguments: usize,
    returns: usize,
    /// The arguments that it changes, as bits, and those of them whose earlier values do not
    /// matter.
    changed: u64,
    overwritten: u64,
    /// The results that the definition leaves open, as bits.
    open: u64,
    /// Indices of [`Kind::ALL`] and [`Choice::ALL`].
    kind: usize,
    choice: usize,
    /// The index of a flag without which no earlier values are ignored. Without one, `arguments`.
    first_step: usize,
    /// What it does at an index of its lists depends on no other index.
    is_indexed: usize,
    /// A letter for the type of each argument and of the results, see [`unboxed::Types`]. Null if
    /// one has no letter.
    types: *const c_char,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Computed,
    /// Its results are not computed, for example those that its definition leaves open.
    Unknown,
    /// The GPU reads the size of the first result in a dimension, or the result itself, which the
    /// CPU computes before.
    Read,
    /// It may copy known bytes of any size. The copies of the runtime and the launches know which.
    Copy,
    /// It draws random numbers.
    Drawn,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Computed, Self::Unknown, Self::Read, Self::Copy];
}

struct Operation {
    handle: Handle,
    on_gpu: Function,
    is_on_cpu: bool,
    arguments: usize,
    returns: usize,
    changed: u64,
    overwritten: u64,
    open: u64,
    kind: Kind,
    choice: Choice,
    first_step: usize,
    is_indexed: bool,
    direct: Option<Direct>,
    draws: Option<Draws>,
    refused: [AtomicU64; MOST_REFUSED],
}

/// The results of `unique`: values, their places and their counts.
const UNIQUE_RESULTS: usize = 3;
/// `c10::ScalarType::Bool`.
const BOOL: i32 = 11;

/// By a hash of the definition's address, with the next slots for collisions.
static OPERATIONS: [AtomicPtr<Operation>; SLOTS] =
    [const { AtomicPtr::new(ptr::null_mut()) }; SLOTS];
/// `__cxa_begin_catch` and `__cxa_end_catch` of the C++ runtime.
static CATCH: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

fn slots(definition: usize) -> impl Iterator<Item = &'static AtomicPtr<Operation>> {
    let first = (definition >> 5) ^ (definition >> 13);
    (0..SLOTS).map(move |index| &OPERATIONS[(first + index) % SLOTS])
}

fn operation(definition: usize) -> Option<&'static Operation> {
    for slot in slots(definition) {
        // SAFETY: null, or an operation that is never freed.
        let operation = unsafe { slot.load(Ordering::Acquire).as_ref() }?;
        if operation.handle.0[0] == definition {
            return Some(operation);
        }
    }
    None
}

/// Where the elements of a tensor are.
#[derive(Clone, Copy)]
struct Layout {
    address: u64,
    scalar_type: i32,
    element: u64,
    dimensions: usize,
    sizes: [i64; MOST_DIMENSIONS],
    strides: [i64; MOST_DIMENSIONS],
}

impl Layout {
    /// `None` for tensors with too many dimensions, and for elements that are no whole bytes.
    fn of(known: &Known, tensor: &Value) -> Option<Self> {
        let [from_sizes, from_strides] = known.shape(tensor);
        let (mut sizes, mut strides) = ([1; MOST_DIMENSIONS], [0; MOST_DIMENSIONS]);
        sizes
            .get_mut(..from_sizes.len())?
            .copy_from_slice(from_sizes);
        strides
            .get_mut(..from_strides.len())?
            .copy_from_slice(from_strides);
        let scalar_type = known.scalar_type(tensor);
        let element = element_size(scalar_type)?;
        let address = get::<usize>(known.torch.address, tensor)? as u64;
        Some(Self {
            address,
            scalar_type,
            element,
            dimensions: from_sizes.len(),
            sizes,
            strides,
        })
    }

    fn sizes(&self) -> &[i64] {
        &self.sizes[..self.dimensions]
    }

    fn elements(&self) -> u64 {
        self.sizes().iter().fold(1, |product: u64, size| {
            product.saturating_mul(size.cast_unsigned())
        })
    }

    fn is_small(&self) -> bool {
        self.elements() <= MOST_ELEMENTS
    }

    /// The layout of the elements that a larger tensor repeats, as after `expand`. `None` if they
    /// are many.
    fn distinct(&self) -> Option<Self> {
        let mut distinct = *self;
        if !self.is_small() {
            if self.elements() > MOST_REPEATED {
                return None;
            }
            for (size, stride) in distinct.sizes.iter_mut().zip(&self.strides) {
                *size = if *stride == 0 { 1 } else { *size };
            }
        }
        distinct.is_small().then_some(distinct)
    }

    fn is_dense(&self) -> bool {
        let mut next = 1;
        self.sizes()
            .iter()
            .zip(&self.strides)
            .rev()
            .all(|(size, stride)| {
                let fits = *size == 1 || *stride == next;
                next *= size;
                fits
            })
    }

    /// Calls a function with the offset of each element in bytes, in the order of the indices.
    fn each(&self, mut act: impl FnMut(u64)) {
        let mut index = [0; MOST_DIMENSIONS];
        for _ in 0..self.elements() {
            let at: i64 = index
                .iter()
                .zip(&self.strides)
                .map(|(index, stride)| index * stride)
                .sum();
            act(at.cast_unsigned() * self.element);
            for dimension in (0..self.dimensions).rev() {
                index[dimension] += 1;
                if index[dimension] < self.sizes[dimension] {
                    break;
                }
                index[dimension] = 0;
            }
        }
    }

    /// Reads the elements of a small tensor of the GPU in their order. Returns whether all are
    /// known.
    fn read(&self, state: &State, into: &mut [u8]) -> bool {
        if self.is_dense() {
            let size = (self.elements() * self.element) as usize;
            return state.copied.read_all(self.address, &mut into[..size]);
        }
        if !self.is_known(state) {
            return false;
        }
        let mut elements = into.chunks_exact_mut(self.element as usize);
        self.each(|offset| {
            if let Some(into) = elements.next() {
                state.copied.read(self.address + offset, into);
            }
        });
        true
    }

    /// Returns whether all elements are known.
    fn is_known(&self, state: &State) -> bool {
        let mut is_known = true;
        self.each(|offset| is_known &= state.copied.knows_all(self.address + offset, self.element));
        is_known
    }

    /// Passes on the elements of a small tensor of the CPU in their order.
    fn with_bytes_of_cpu(&self, act: impl FnOnce(&[u8])) {
        let size = (self.elements() * self.element) as usize;
        if self.is_dense() && size > 0 {
            let start = ptr::with_exposed_provenance::<u8>(self.address as usize);
            // SAFETY: the elements belong to a tensor of the CPU, one after the other.
            return act(unsafe { slice::from_raw_parts(start, size) });
        }
        let (mut bytes, mut next) = ([0_u8; 16 * MOST_ELEMENTS as usize], 0);
        let element = self.element as usize;
        self.each(|offset| {
            let start = ptr::with_exposed_provenance::<u8>((self.address + offset) as usize);
            let into = bytes[next..next + element].as_mut_ptr();
            // SAFETY: the element belongs to a tensor of the CPU.
            unsafe { ptr::copy_nonoverlapping(start, into, element) };
            next += element;
        });
        act(&bytes);
    }

    /// Stores the elements of a small tensor of the GPU.
    fn write(&self, state: &mut State, from: &[u8]) {
        if self.is_dense() {
            return state.copied.write(
                self.address,
                &from[..(self.elements() * self.element) as usize],
            );
        }
        let mut next = 0;
        self.each(|offset| {
            state.copied.write(
                self.address + offset,
                &from[next..next + self.element as usize],
            );
            next += self.element as usize;
        });
    }

    fn forget(&self, state: &mut State) {
        let strides = &self.strides[..self.dimensions];
        if let Some((start, len)) = range(self.address, self.element, self.sizes(), strides) {
            state.copied.forget(start, len);
        }
    }
}

/// The range of device memory from the first element of a tensor to the end of the last one. `None`
/// for an empty tensor.
fn range(address: u64, element: u64, sizes: &[i64], strides: &[i64]) -> Option<(u64, u64)> {
    let mut last = 0;
    for (size, stride) in sizes.iter().zip(strides) {
        if *size == 0 {
            return None;
        }
        last += (size - 1) * stride;
    }
    is_device_memory(address).then_some((address, (last.cast_unsigned() + 1) * element))
}

/// Type, number of dimensions, sizes, and those of them whose elements are distinct.
type Shape = (i32, usize, [[i64; MOST_DIMENSIONS]; 2]);

/// A tensor of the CPU with memory for the distinct elements of a tensor, in the order of the
/// indices.
struct Spare {
    shape: Shape,
    /// The address of an `at::Tensor`.
    tensor: usize,
    bytes: Box<[u128; MOST_ELEMENTS as usize]>,
}

thread_local! {
    static SPARE: RefCell<HashMap<Shape, Vec<Spare>, BuildHasherDefault<Words>>> =
        RefCell::default();
}

/// Hashes words in little time.
struct Words(Signature);

impl Default for Words {
    fn default() -> Self {
        Self(Signature(0))
    }
}

impl Hasher for Words {
    fn write(&mut self, bytes: &[u8]) {
        let words = bytes.chunks(size_of::<u64>());
        words.for_each(|word| {
            let mut padded = [0; size_of::<u64>()];
            padded[..word.len()].copy_from_slice(word);
            self.0.add(u64::from_ne_bytes(padded));
        });
    }

    fn write_i32(&mut self, word: i32) {
        self.0.add(u64::from(word.cast_unsigned()));
    }

    fn write_usize(&mut self, word: usize) {
        self.0.add(word as u64);
    }

    fn finish(&self) -> u64 {
        self.0.0
    }
}

impl Spare {
    fn new(known: &Known, layout: &Layout) -> Option<Self> {
        let distinct = layout.distinct()?;
        let sizes = [layout.sizes, distinct.sizes];
        let shape = (layout.scalar_type, layout.dimensions, sizes);
        if let Some(spare) = SPARE.with_borrow_mut(|spares| spares.get_mut(&shape)?.pop()) {
            return Some(spare);
        }
        let mut bytes = Box::new([0; MOST_ELEMENTS as usize]);
        let mut strides = [1; MOST_DIMENSIONS];
        for dimension in (0..layout.dimensions.saturating_sub(1)).rev() {
            strides[dimension] = strides[dimension + 1] * distinct.sizes[dimension + 1].max(1);
        }
        for (stride, [size, distinct]) in strides.iter_mut().zip(
            layout
                .sizes
                .iter()
                .zip(&distinct.sizes)
                .map(|(a, b)| [a, b]),
        ) {
            *stride = if size == distinct { *stride } else { 0 };
        }
        let mut tensor = ptr::null_mut();
        let data = bytes.as_mut_ptr().expose_provenance();
        let (dimensions, sizes) = (layout.dimensions as i64, layout.sizes.as_ptr());
        // SAFETY: the bytes are as long as the elements and live as long as the tensor.
        let code = unsafe {
            (known.torch.from_blob)(
                data,
                dimensions,
                sizes,
                strides.as_ptr(),
                0,
                layout.scalar_type,
                0,
                0,
                &raw mut tensor,
            )
        };
        (code == 0).then(|| Self {
            shape,
            tensor: tensor.expose_provenance(),
            bytes,
        })
    }

    fn value(&self) -> Value {
        Value {
            // SAFETY: an `at::Tensor` is the address of its object.
            payload: unsafe { *ptr::with_exposed_provenance::<usize>(self.tensor) },
            tag: TENSOR,
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: any bytes are valid in both types.
        unsafe {
            slice::from_raw_parts_mut(self.bytes.as_mut_ptr().cast(), size_of_val(&*self.bytes))
        }
    }

    /// Keeps the tensor for later, unless an operation has kept a reference.
    fn keep(self) {
        if counts(self.value().payload).load(Ordering::Acquire) as u32 != 1 {
            return mem::forget(self);
        }
        let rest = SPARE.with_borrow_mut(|spares| {
            if spares.len() >= MOST_SHAPES && !spares.contains_key(&self.shape) {
                return Some(self);
            }
            let same = spares.entry(self.shape).or_default();
            if same.len() < MOST_SPARE {
                same.push(self);
                return None;
            }
            Some(self)
        });
        if let (Some(rest), Some(known)) = (rest, KNOWN.get()) {
            // SAFETY: `from_blob` returned it.
            unsafe { (known.torch.delete)(ptr::with_exposed_provenance_mut(rest.tensor)) };
        }
    }
}

/// A tensor of the GPU among the arguments.
struct Input {
    tensor: Value,
    layout: Option<Layout>,
    is_changed: bool,
    /// Its counterpart on the CPU. `None` for a large tensor.
    spare: Option<Spare>,
    is_known: bool,
}

thread_local! {
    /// Memory for the inputs of the next [`Run`].
    static INPUTS: Cell<Vec<Input>> = const { Cell::new(Vec::new()) };
}

/// What an operation on small tensors needs after the GPU's kernel.
struct Run<'a> {
    known: &'a Known,
    operation: &'a Operation,
    /// The caller keeps references to the arguments, so that this needs none.
    borrows: bool,
    inputs: Vec<Input>,
    /// The arguments of the CPU, if it can compute the results.
    values: Option<Values>,
    /// Arguments on the stack of the CPU that are overwritten: their place, and the input.
    overwritten: Vec<(usize, usize)>,
    /// The lists of tensors among the arguments.
    lists: Vec<Tensors>,
    /// The indices of lists at which all is known. `None` for all.
    live: Option<Vec<usize>>,
    /// The rows of the first argument among whose elements the GPU may choose.
    ties: Option<Rows>,
    signature: Signature,
}

/// A list of tensors among the arguments.
struct Tensors {
    place: usize,
    list: &'static List,
    /// Their counterparts on the CPU, and their inputs.
    tensors: Vec<(Option<Value>, Range<usize>)>,
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        if let Some(mut values) = self.values.take() {
            clear(self.known, &mut values);
        }
        for input in self.inputs.drain(..) {
            if !self.borrows {
                drop_reference(self.known, input.tensor);
            }
            if let Some(spare) = input.spare {
                spare.keep();
            }
        }
        INPUTS.set(mem::take(&mut self.inputs));
    }
}

/// Removes a reference to a tensor. PyTorch does this if it may be the last one of C++.
fn drop_reference(known: &Known, value: Value) {
    if !known.torch.is_defined(value) {
        return;
    }
    let counts = counts(value.payload).load(Ordering::Acquire);
    let is_known_to_python = counts >> 63 == 1;
    if counts as u32 != 1 && !is_known_to_python {
        return release(value.payload);
    }
    // SAFETY: C++ frees the memory with the same allocator, and the reference is ours.
    unsafe {
        let holder = libc::malloc(size_of::<usize>()).cast::<usize>();
        holder.write(value.payload);
        (known.torch.delete)(holder);
    }
}

/// Removes the references of a stack, of which some are the last ones.
fn clear(known: &Known, values: &mut Values) {
    for value in values.stack.all() {
        match value.tag {
            TENSOR => drop_reference(known, *value),
            tag if tag == known.list_tag => drop_list(known, *value),
            tag if tag == known.string_tag => release(value.payload),
            _ => {}
        }
    }
    values.stack.end = values.stack.start;
}

/// Removes a reference to a list. Only PyTorch can free a list that it made: its kernel for this
/// operation takes over the last reference.
fn drop_list(known: &Known, list: Value) {
    let is_last = counts(list.payload).load(Ordering::Acquire) as u32 == 1;
    let has_tensors = known.list(&list).is_some_and(|list| {
        list.elements
            .all()
            .iter()
            .all(|element| known.torch.is_defined(*element))
    });
    if !is_last || !has_tensors {
        return release(list.payload);
    }
    let handle = known.torch.find(c"aten::_foreach_zero_", c"");
    let mut stack = Stack::new(&[list], 1);
    let _ = attempt(known, &handle, &mut stack);
    // SAFETY: it was allocated with this allocator.
    unsafe { libc::free(stack.start.cast()) };
}

/// Calls the CPU's kernel of an operation, whose arguments are the stack. Returns whether it throws
/// no exception.
fn attempt(known: &Known, handle: &Handle, stack: &mut Stack) -> bool {
    let kernel = handle.kernel(known.on_cpu);
    let Some(function) = kernel.function() else {
        return false;
    };
    // SAFETY: the operation takes these arguments.
    let thrown = unsafe {
        harness_small_try(
            function as usize,
            kernel.object,
            handle,
            known.torch.cpu_keys,
            stack,
        )
    };
    if !thrown.is_null() {
        // SAFETY: the C++ runtime threw the exception.
        unsafe {
            let [begin, end] =
                [&CATCH[0], &CATCH[1]].map(|function| function.load(Ordering::Relaxed));
            mem::transmute::<usize, extern "C" fn(*mut c_void) -> *mut c_void>(begin)(thrown);
            mem::transmute::<usize, extern "C" fn()>(end)();
        }
    }
    thrown.is_null()
}

impl Known {
    fn is_on_gpu_and_defined(&self, value: &Value) -> bool {
        self.torch.is_defined(*value) && self.is_on_gpu(value) == Some(true)
    }

    /// Returns whether a value is a plain tensor on the GPU with few elements, or repeats few.
    fn is_small_on_gpu(&self, value: &Value) -> bool {
        self.torch.is_defined(*value) && self.is_small(value) && self.is_on_gpu(value) == Some(true)
    }

    fn is_small(&self, tensor: &Value) -> bool {
        match self.elements(tensor) {
            0..=MOST_ELEMENTS => true,
            elements if elements <= MOST_REPEATED => {
                let [sizes, strides] = self.shape(tensor);
                let places = sizes.iter().zip(strides);
                let distinct = places.filter(|(_, stride)| **stride != 0);
                let count: i64 = distinct.map(|(size, _)| size).product();
                count.cast_unsigned() <= MOST_ELEMENTS
            }
            _ => false,
        }
    }

    /// The values, with the elements of lists in their place.
    fn tensors(&self, values: &[Value]) -> impl Iterator<Item = Value> {
        values
            .iter()
            .flat_map(|value| self.elements_of(value))
            .copied()
    }

    /// The elements of a list, or the value.
    fn elements_of<'a>(&self, value: &'a Value) -> &'a [Value] {
        self.list(value)
            .map_or(slice::from_ref(value), |list| list.elements.all())
    }

    /// The range of a tensor of the GPU that may have known bytes.
    fn known_range(&self, tensor: &Value) -> Option<(u64, u64)> {
        if !self.is_on_gpu_and_defined(tensor) {
            return None;
        }
        let address = self.address(tensor)?;
        let element = element_size(self.scalar_type(tensor))?;
        let [sizes, strides] = self.shape(tensor);
        range(address, element, sizes, strides).filter(|(start, len)| may_know_any(*start, *len))
    }

    /// Returns whether a value needs no bytes of the GPU, or is a small tensor that may have known
    /// ones.
    fn may_be_known(&self, value: &Value) -> bool {
        if !self.is_on_gpu_and_defined(value) {
            return true;
        }
        let is_empty = self.elements(value) == 0;
        is_empty || (self.is_small(value) && self.address(value).is_some_and(copied::may_know))
    }

    /// Returns whether a kernel may run `copy_` on the GPU. The runtime copies dense tensors of the
    /// same type and layout.
    fn may_copy_by_kernel(&self, arguments: &[Value]) -> bool {
        let [to, from, ..] = arguments else {
            return false;
        };
        if ![to, from]
            .iter()
            .all(|tensor| self.is_on_gpu_and_defined(tensor))
        {
            return false;
        }
        let [sizes, strides] = self.shape(to);
        let places = sizes.iter().zip(strides);
        let last: i64 = places.map(|(size, stride)| (size - 1) * stride).sum();
        self.scalar_type(to) != self.scalar_type(from)
            || self.shape(from) != [sizes, strides]
            || last + 1 != sizes.iter().product::<i64>()
    }

    /// Returns whether `copy_` fills a large tensor from the CPU. It consists of copies of the
    /// runtime and of other operations, which know what they write.
    fn copies_many_from_cpu(&self, arguments: &[Value]) -> bool {
        let [to, from, ..] = arguments else {
            return false;
        };
        let are_defined = [to, from].map(|tensor| self.torch.is_defined(*tensor));
        are_defined == [true; 2] && self.is_on_gpu(from) == Some(false) && !self.is_small(to)
    }

    fn list(&self, value: &Value) -> Option<&'static List> {
        // SAFETY: a value with this tag has the address of a list, which lives as long as the
        // value.
        (value.tag == self.list_tag)
            .then(|| unsafe { &*ptr::with_exposed_provenance::<List>(value.payload) })
    }
}

impl Operation {
    /// Returns whether the operation may read or change known values, or makes its result of
    /// numbers.
    fn concerns(&self, known: &Known, arguments: &[Value]) -> bool {
        let has_tensors = known.tensors(arguments).any(|value| value.tag == TENSOR);
        let concerns = |(index, argument): (usize, &Value)| match known.list(argument) {
            // A kernel can take the addresses of a list in a class with unknown fields. Then its
            // launch may not forget all that it changes.
            Some(list) if self.changed & 1 << index != 0 => {
                copied::any() && !list.elements.all().is_empty()
            }
            None if self.changed & 1 << index != 0 => {
                known.is_small_on_gpu(argument) || known.known_range(argument).is_some()
            }
            _ => {
                let mut tensors = known.elements_of(argument).iter();
                tensors.any(|tensor| known.is_small_on_gpu(tensor))
            }
        };
        !has_tensors || arguments.iter().enumerate().any(concerns)
    }

    /// Returns whether no argument depends on a large tensor or on one that is not known.
    fn is_computable(&self, known: &Known, arguments: &[Value]) -> bool {
        // The GPU's kernel of such an operation forgets known arguments, which are stored again.
        // For distinct flags, it reads how many are true, which is not the size of its result.
        let may_be_known = |value: &Value| match self.kind {
            Kind::Read if !known.is_on_gpu_and_defined(value) => true,
            Kind::Read => {
                let is_of_flags =
                    self.returns == UNIQUE_RESULTS && known.scalar_type(value) == BOOL;
                !is_of_flags && known.is_small_on_gpu(value)
            }
            _ => known.may_be_known(value),
        };
        if self.is_indexed && self.is_on_cpu {
            return self.is_computable_at_any(known, arguments);
        }
        self.is_on_cpu
            && self.kind != Kind::Unknown
            && arguments.iter().enumerate().all(|(index, argument)| {
                if self.overwritten & 1 << index != 0 {
                    return self.kind != Kind::Drawn || known.is_small(argument);
                }
                known.elements_of(argument).iter().all(may_be_known)
            })
    }

    /// Returns whether there is an index of its lists at which all may be known.
    fn is_computable_at_any(&self, known: &Known, arguments: &[Value]) -> bool {
        let (mut lists, mut are_known) = (Vec::new(), true);
        for (index, argument) in arguments.iter().enumerate() {
            let is_overwritten = self.overwritten & 1 << index != 0;
            match known.list(argument).map(|list| list.elements.all()) {
                Some([first, ..]) if first.tag == TENSOR => {
                    lists.push((is_overwritten, known.elements_of(argument)))
                }
                Some(_) => {}
                None => are_known &= known.may_be_known(argument),
            }
        }
        let count = lists.iter().map(|(_, list)| list.len()).max();
        let may_be_known = |index: usize| {
            lists.iter().all(|(is_overwritten, list)| {
                list.get(index).is_none_or(|tensor| match is_overwritten {
                    true => known.is_small(tensor),
                    false => known.may_be_known(tensor),
                })
            })
        };
        are_known && (0..count.unwrap_or(0)).any(may_be_known)
    }

    /// The ranges with known bytes that the operation changes.
    fn changed_ranges(&self, known: &Known, arguments: &[Value]) -> Vec<(u64, u64)> {
        let mut ranges = Vec::new();
        for (index, argument) in arguments.iter().enumerate() {
            if self.changed & 1 << index != 0 {
                let tensors = known.elements_of(argument).iter();
                ranges.extend(tensors.filter_map(|tensor| known.known_range(tensor)));
            }
        }
        ranges
    }

    /// Returns whether the kernels of an operation that is not computed may write to known bytes.
    fn forgets(&self, known: &Known, arguments: &[Value]) -> bool {
        let is_forgetting = match self.kind {
            Kind::Computed | Kind::Unknown | Kind::Drawn => true,
            Kind::Read => false,
            Kind::Copy => known.may_copy_by_kernel(arguments),
        };
        is_forgetting && copied::any()
    }

    /// Returns whether the results of a call are not known because of one of its tensors, and none
    /// that changes has known bytes. The objects of tensors have the index of their argument.
    fn only_forgets<'a>(
        &self,
        known: &Known,
        tensors: impl Iterator<Item = (usize, &'a [usize])>,
    ) -> bool {
        if self.is_indexed || [Kind::Read, Kind::Copy].contains(&self.kind) {
            return false;
        }
        let mut is_computable = self.is_on_cpu && self.kind != Kind::Unknown;
        for (index, objects) in tensors {
            let has_bit = |bits: u64| bits & 1 << index != 0;
            for object in objects {
                let tensor = Value::new(TENSOR, *object);
                if has_bit(self.changed) && known.known_range(&tensor).is_some() {
                    return false;
                }
                is_computable = is_computable
                    && match has_bit(self.overwritten) {
                        true => self.kind != Kind::Drawn || known.is_small(&tensor),
                        false => known.may_be_known(&tensor),
                    };
            }
        }
        !is_computable
    }

    /// Returns whether `_foreach_copy_` calls `copy_` for each tensor, because one is on the CPU.
    fn copies_each(&self, known: &Known, arguments: &[Value]) -> bool {
        let has_lists = arguments.first().is_some_and(|to| known.list(to).is_some());
        let is_on_cpu = |tensor: &Value| known.is_on_gpu(tensor) == Some(false);
        let mut defined = known
            .tensors(arguments)
            .filter(|value| known.torch.is_defined(*value));
        self.choice == Choice::Casts && has_lists && defined.any(|tensor| is_on_cpu(&tensor))
    }

    /// Decides on a call by its tensors.
    fn plan(&self, known: &Known, arguments: &[Value]) -> Plan {
        let is_copy = self.kind == Kind::Copy && known.copies_many_from_cpu(arguments);
        if (is_copy || self.copies_each(known, arguments)) && !is_captured() {
            return Plan::Leave;
        }
        let concerns = self.concerns(known, arguments);
        if concerns && self.is_computable(known, arguments) {
            return Plan::Compute;
        }
        if !self.forgets(known, arguments) {
            return Plan::Leave;
        }
        Plan::Forget(match concerns {
            true => self.changed_ranges(known, arguments),
            false => Vec::new(),
        })
    }

    /// Prepares the computation.
    fn before<'a>(&'a self, known: &'a Known, arguments: &[Value], borrows: bool) -> Around<'a> {
        let direct = self.direct.filter(|_| !is_captured());
        if let Some(number) = direct.and_then(|direct| direct.compute(known, arguments)) {
            return Around::Direct(number, Kept::new());
        }
        if let Some(draws) = self.draws {
            let drawing = draws.begin(known, arguments).filter(|_| !is_captured());
            return match drawing {
                Some(drawing) => Around::Draw(drawing, Kept::new()),
                None => Around::Forget(self.changed_ranges(known, arguments), Kept::new()),
            };
        }
        let mut run = self.prepare(known, arguments, borrows);
        if self.kind != Kind::Read {
            // What a kernel reads back may be in memory of an earlier tensor.
            return Around::Compute(run, Kept::new());
        }
        let dimension = arguments.iter().find(|argument| argument.tag == INT);
        let dimension = dimension.map_or(0, |dimension| dimension.payload as i64);
        let is_computed = run.read(dimension);
        if let Some(mut values) = run.values.take_if(|_| !is_computed) {
            clear(known, &mut values);
        }
        Around::Read(run, is_computed)
    }

    fn prepare<'a>(&'a self, known: &'a Known, arguments: &[Value], borrows: bool) -> Run<'a> {
        let mut run = Run {
            known,
            operation: self,
            borrows,
            inputs: INPUTS.take(),
            values: None,
            overwritten: Vec::new(),
            lists: Vec::new(),
            live: None,
            ties: self.ties(known, arguments),
            signature: Signature(self.handle.0[0] as u64),
        };
        let mut values = Values {
            stack: Stack::new(&[], arguments.len() + 1),
            lists: Vec::new(),
        };
        let mut is_computed = self.is_on_cpu && self.kind != Kind::Unknown;
        let flag = arguments.get(self.first_step);
        let is_first = flag.is_none_or(|flag| flag.payload as u8 == 1);
        let overwritten = if is_first { self.overwritten } else { 0 };
        let state = machine().state();
        for (index, argument) in arguments.iter().enumerate() {
            let is_overwritten = overwritten & 1 << index != 0;
            is_computed &= run.add(&state, &mut values, index, argument, is_overwritten);
        }
        is_computed = is_computed && run.add_lists(&mut values, arguments);
        is_computed &= !self
            .refused
            .iter()
            .any(|refused| refused.load(Ordering::Relaxed) == run.signature.0);
        is_computed = is_computed && !self.chooses(known, &state, arguments);
        drop(state);
        if is_computed && !is_captured() {
            run.values = Some(values);
        } else {
            clear(known, &mut values);
        }
        run
    }
}

/// Returns whether a stream captures: then kernels run later.
fn is_captured() -> bool {
    contents::harness_values_captures.load(Ordering::Relaxed) > 0
        && machine().state().streams.is_capturing()
}

/// What a call needs besides the GPU's kernel.
enum Plan {
    Leave,
    /// What it changes is not known afterwards. These are the ranges that have known bytes now.
    Forget(Vec<(u64, u64)>),
    Compute,
}

/// A call of the GPU's kernel, and what follows.
enum Around<'a> {
    /// These ranges and the results are not known afterwards.
    Forget(Vec<(u64, u64)>, Kept),
    Compute(Run<'a>, Kept),
    /// The first result has this number as its elements.
    Direct(Number, Kept),
    Draw(Drawing, Kept),
    /// The number that the kernel reads is announced. Whether it is known.
    Read(Run<'a>, bool),
}

impl Around<'_> {
    /// Ends a call that has returned these results.
    fn after(self, known: &Known, mut results: impl Iterator<Item = Value>) {
        match self {
            Self::Forget(changed, kept) => {
                drop(kept);
                let new = results.filter_map(|result| known.known_range(&result));
                for (start, len) in changed.into_iter().chain(new) {
                    machine().state().copied.forget(start, len);
                }
            }
            Self::Compute(run, kept) => {
                drop(kept);
                run.finish(&results.collect::<Vec<_>>(), false);
            }
            Self::Direct(number, kept) => {
                drop(kept);
                if let Some(result) = results.next() {
                    number.store(known, &result);
                }
            }
            Self::Draw(drawing, kept) => {
                drop(kept);
                drawing.store(known, &results.collect::<Vec<_>>());
            }
            Self::Read(run, is_computed) => {
                reads::announce(None);
                run.finish(&results.collect::<Vec<_>>(), is_computed);
            }
        }
    }
}

impl Run<'_> {
    /// Adds an argument. Returns whether the CPU can compute with it.
    fn add(
        &mut self,
        state: &State,
        values: &mut Values,
        index: usize,
        argument: &Value,
        is_overwritten: bool,
    ) -> bool {
        let known = self.known;
        self.signature.add(u64::from(argument.tag));
        let is_changed = self.operation.changed & 1 << index != 0;
        if let Some(list) = known.list(argument) {
            let elements = list.elements.all();
            if !elements.iter().any(|element| element.tag == TENSOR) {
                return values.push(*argument, known);
            }
            // All are visited before the first unknown one ends this, because all that change are
            // forgotten.
            let mut tensors = Vec::with_capacity(elements.len());
            for element in elements {
                let first = self.inputs.len();
                let tensor = self.tensor(state, element, is_changed, is_overwritten);
                tensors.push((tensor, first..self.inputs.len()));
            }
            let place = index;
            self.lists.push(Tensors {
                place,
                list,
                tensors,
            });
            return values.push(Value::new(NONE, 0), known);
        }
        match argument.tag {
            TENSOR if is_overwritten => {
                self.overwritten.push((index, self.inputs.len()));
                self.input(argument, true)
                    && values.push(
                        Value {
                            payload: 0,
                            tag: NONE,
                        },
                        known,
                    )
            }
            TENSOR => match self.tensor(state, argument, is_changed, false) {
                Some(tensor) => values.push(tensor, known),
                None => false,
            },
            tag if tag == known.device_tag => values.push(Value { payload: CPU, tag }, known),
            NONE | DOUBLE | INT => values.push(*argument, known),
            tag if [known.bool_tag, known.string_tag].contains(&tag) => {
                values.push(*argument, known)
            }
            _ => false,
        }
    }

    /// Makes the lists of tensors for the CPU. If the operation is indexed, they have only the
    /// indices at which all is known. Returns whether the CPU can compute with them.
    fn add_lists(&mut self, values: &mut Values, arguments: &[Value]) -> bool {
        let lists = mem::take(&mut self.lists);
        let count = lists
            .iter()
            .map(|list| list.tensors.len())
            .max()
            .unwrap_or(0);
        let is_live = |index: &usize| {
            lists.iter().all(|list| {
                let tensor = list.tensors.get(*index);
                tensor.is_none_or(|(tensor, _)| tensor.is_some())
            })
        };
        let live: Vec<usize> = (0..count).filter(is_live).collect();
        if live.len() < count {
            let are_alike = lists.iter().all(|list| list.tensors.len() == count);
            if !self.operation.is_indexed || !are_alike || live.is_empty() {
                return false;
            }
            self.leave_others(values, arguments, &lists, &live);
        }
        for list in lists {
            let tensors = live.iter().filter_map(|index| list.tensors.get(*index)?.0);
            let tensors: Vec<Value> = tensors.collect();
            let mut objects = tensors
                .iter()
                .filter(|tensor| self.known.is_object(**tensor));
            if !objects.all(|tensor| self.known.retain(tensor))
                || !self.put_list(values, list.place, &tensors, list.list)
            {
                return false;
            }
        }
        if live.len() < count {
            self.live = Some(live);
        }
        true
    }

    /// Puts a list in the place of an argument of the CPU.
    fn put_list(&self, values: &mut Values, place: usize, elements: &[Value], like: &List) -> bool {
        let list = list_of(elements, like);
        values.lists.push(list);
        let value = Value::new(self.known.list_tag, list.expose_provenance());
        let slot = &mut values.stack.last(self.operation.arguments)[place];
        if slot.tag == self.known.list_tag {
            release(slot.payload);
        }
        *slot = Value::new(NONE, 0);
        let is_retained = self.known.retain(&value);
        if is_retained {
            *slot = value;
        }
        is_retained
    }

    /// Removes what lists have at other indices than the live ones: counterparts of tensors, and
    /// numbers.
    fn leave_others(
        &mut self,
        values: &mut Values,
        arguments: &[Value],
        lists: &[Tensors],
        live: &[usize],
    ) {
        let is_other = |index: &usize| live.binary_search(index).is_err();
        for list in lists {
            for (_, (_, inputs)) in list
                .tensors
                .iter()
                .enumerate()
                .filter(|(index, _)| is_other(index))
            {
                for input in &mut self.inputs[inputs.clone()] {
                    if let Some(spare) = input.spare.take() {
                        spare.keep();
                    }
                }
            }
        }
        let count = lists.first().map_or(0, |list| list.tensors.len());
        for (place, argument) in arguments.iter().enumerate() {
            let is_of_tensors = lists.iter().any(|list| list.place == place);
            if let Some(list) = self.known.list(argument).filter(|_| !is_of_tensors)
                && list.elements.all().len() == count
            {
                let numbers = live.iter().map(|index| list.elements.all()[*index]);
                self.put_list(values, place, &numbers.collect::<Vec<_>>(), list);
            }
        }
    }

    /// Returns whether the CPU computes what lists have at an index.
    fn is_live(&self, index: usize) -> bool {
        let live = self.live.as_ref();
        live.is_none_or(|live| live.binary_search(&index).is_ok())
    }

    /// Adds a tensor of the GPU. Returns whether it is plain.
    fn input(&mut self, tensor: &Value, is_changed: bool) -> bool {
        let known = self.known;
        if !known.is_on_gpu_and_defined(tensor) || !(self.borrows || known.retain(tensor)) {
            return false;
        }
        let layout = Layout::of(known, tensor);
        let element = layout.as_ref().map_or(0, |layout| layout.scalar_type);
        self.signature.add(element as u64 | 1 << 8);
        self.inputs.push(Input {
            tensor: *tensor,
            layout,
            is_changed,
            spare: None,
            is_known: false,
        });
        layout.is_some()
    }

    /// The counterpart of a tensor on the CPU, if its values are known or overwritten.
    fn tensor(
        &mut self,
        state: &State,
        tensor: &Value,
        is_changed: bool,
        is_overwritten: bool,
    ) -> Option<Value> {
        let known = self.known;
        if !known.torch.is_defined(*tensor) {
            return Some(*tensor);
        }
        if known.is_on_gpu(tensor) == Some(false) {
            self.signature.add(known.scalar_type(tensor) as u64);
            return (!is_changed).then_some(*tensor);
        }
        if !self.input(tensor, is_changed) {
            return None;
        }
        let input = self.inputs.last_mut()?;
        let layout = input.layout?;
        let distinct = layout.distinct()?;
        let mut spare = Spare::new(known, &layout)?;
        input.is_known = distinct.read(state, spare.bytes());
        let value = spare.value();
        input.spare = Some(spare);
        (input.is_known || is_overwritten).then_some(value)
    }

    /// Computes the arguments of the CPU: its results replace them. Returns whether the CPU accepts
    /// them.
    fn compute(&mut self) -> bool {
        let Some(values) = &mut self.values else {
            return false;
        };
        if attempt(self.known, &self.operation.handle, &mut values.stack) {
            return true;
        }
        let unused = |refused: &&AtomicU64| {
            refused
                .compare_exchange(0, self.signature.0, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        };
        let _ = self.operation.refused.iter().find(unused);
        false
    }

    /// Computes and stores the results of the GPU's kernel. The elements of lists are in their
    /// place.
    fn finish(mut self, results: &[Value], is_computed: bool) {
        let (known, operation) = (self.known, self.operation);
        let is_new = |value: &Value| {
            let is_argument = self
                .inputs
                .iter()
                .any(|input| input.tensor.payload == value.payload);
            known.is_on_gpu_and_defined(value) && !is_argument
        };
        let layout = |value: &Value| {
            if is_new(value) {
                Layout::of(known, value)
            } else {
                None
            }
        };
        let new: Vec<Option<Layout>> = results.iter().map(layout).collect();
        for input in self.inputs.iter_mut().filter(|input| input.is_changed) {
            input.layout = Layout::of(known, &input.tensor);
        }
        let changed = self.inputs.iter().filter(|input| input.is_changed);
        let changed = changed.filter(|input| self.live.is_none() || input.spare.is_some());
        let changed = changed.filter_map(|input| input.layout.as_ref());
        let live = new
            .iter()
            .enumerate()
            .filter(|(index, _)| self.is_live(*index));
        let mut layouts = live
            .filter_map(|(_, layout)| layout.as_ref())
            .chain(changed);
        let are_small = self.values.is_some() && layouts.all(Layout::is_small);
        let is_computed = are_small && (is_computed || (self.overwrite() && self.compute()));
        let is_copied = !is_computed && self.is_copied_by_runtime();
        let mut state = machine().state();
        if operation.kind == Kind::Read {
            for input in self
                .inputs
                .iter_mut()
                .filter(|input| input.is_known && !input.is_changed)
            {
                let distinct = input.layout.as_ref().and_then(Layout::distinct);
                if let (Some(distinct), Some(spare)) = (distinct, &mut input.spare) {
                    distinct.write(&mut state, spare.bytes());
                }
            }
        }
        if is_computed {
            self.store(&mut state, &new);
            return self.forget_ties(&mut state, &new);
        }
        if is_copied {
            return;
        }
        let changed = self
            .inputs
            .iter()
            .filter(|input| input.is_changed)
            .filter_map(|input| input.layout.as_ref());
        changed
            .chain(new.iter().flatten())
            .for_each(|layout| layout.forget(&mut state));
    }

    /// Returns whether the runtime has copied the bytes of this operation, also if only some are
    /// known.
    fn is_copied_by_runtime(&self) -> bool {
        let tensors: Vec<Value> = self.inputs.iter().map(|input| input.tensor).collect();
        let is_copy = self.operation.kind == Kind::Copy && tensors.len() == 2;
        is_copy && !is_captured() && !self.known.may_copy_by_kernel(&tensors)
    }

    /// Makes the tensors of the CPU for the arguments that are overwritten, whose sizes the GPU's
    /// kernel may have changed.
    fn overwrite(&mut self) -> bool {
        for (place, index) in mem::take(&mut self.overwritten) {
            let Some(layout) = self.inputs[index].layout else {
                return false;
            };
            let Some(spare) = Spare::new(self.known, &layout) else {
                return false;
            };
            let value = spare.value();
            self.inputs[index].spare = Some(spare);
            let Some(values) = &mut self.values else {
                return false;
            };
            if !self.known.retain(&value) {
                return false;
            }
            values.stack.last(self.operation.arguments)[place] = value;
        }
        true
    }

    /// Stores the results of the CPU, and forgets those that it lacks.
    fn store(&mut self, state: &mut State, new: &[Option<Layout>]) {
        let known = self.known;
        for input in self.inputs.iter_mut().filter(|input| input.is_changed) {
            match (&input.layout, &mut input.spare) {
                (Some(layout), Some(spare)) => layout.write(state, spare.bytes()),
                (Some(layout), None) => layout.forget(state),
                (None, _) => {}
            }
        }
        if new.iter().all(Option::is_none) {
            return;
        }
        let computed = self.values.as_ref().map(|values| values.stack.all());
        let computed: Vec<Value> = known.tensors(computed.unwrap_or_default()).collect();
        let live: Vec<usize> = (0..new.len())
            .filter(|index| self.is_live(*index))
            .collect();
        for (index, layout) in new.iter().enumerate() {
            let Some(layout) = layout else { continue };
            let is_open = self.operation.open & 1 << index != 0;
            let place = live.binary_search(&index).ok();
            let of_cpu = place
                .and_then(|place| computed.get(place))
                .filter(|result| {
                    computed.len() == live.len() && !is_open && known.torch.is_defined(**result)
                });
            let from = of_cpu
                .and_then(|result| Layout::of(known, result))
                .filter(|from| {
                    from.scalar_type == layout.scalar_type && from.sizes() == layout.sizes()
                });
            match from {
                Some(from) => from.with_bytes_of_cpu(|bytes| layout.write(state, bytes)),
                None => layout.forget(state),
            }
        }
    }

    /// Forgets results for which the GPU may choose other equal elements of the first argument.
    fn forget_ties(&mut self, state: &mut State, new: &[Option<Layout>]) {
        let Some(rows) = self.ties else { return };
        let changed = self.inputs.iter().filter(|input| input.is_changed);
        let changed = changed.filter_map(|input| input.layout);
        let results: Vec<Layout> = new.iter().copied().flatten().chain(changed).collect();
        let [values, indices] = results[..] else {
            return results.iter().for_each(|layout| layout.forget(state));
        };
        let mut found = [0; 16 * MOST_ELEMENTS as usize];
        let is_known = values.read(state, &mut found);
        let argument = self.inputs.first_mut().and_then(|input| {
            let layout = input.layout.filter(Layout::is_small)?;
            Some((layout.elements() * layout.element, input.spare.as_mut()?))
        });
        match argument.filter(|_| is_known) {
            Some((size, spare)) => {
                let elements = &spare.bytes()[..size as usize];
                rows.forget_ties(state, [&values, &indices], elements, &found);
            }
            None => indices.forget(state),
        }
    }

    /// Computes the result before the GPU's kernel runs, and announces the number that the kernel
    /// reads: of a tensor, its size in this dimension. Returns whether the result is known.
    fn read(&mut self, dimension: i64) -> bool {
        if !self.compute() {
            return false;
        }
        let number = self
            .values
            .as_ref()
            .and_then(|values| match values.stack.all() {
                [result, ..] if result.tag == TENSOR => {
                    let [sizes, _] = self.known.shape(result);
                    let from_end = if dimension < 0 { sizes.len() as i64 } else { 0 };
                    sizes
                        .get(usize::try_from(dimension + from_end).ok()?)
                        .copied()
                }
                [result] if result.tag == self.known.bool_tag => {
                    Some((result.payload as u8).into())
                }
                _ => None,
            });
        reads::announce(number);
        number.is_some()
    }
}

/// The function of kernels that [`harness_small_compute`] has replaced.
unsafe extern "C-unwind" fn run(
    object: *mut c_void,
    handle: *const Handle,
    keys: u64,
    stack: *mut Stack,
) {
    // SAFETY: PyTorch passes a handle and a stack, and nothing else uses the stack during the call.
    let (handle, stack) = unsafe { (&*handle, &mut *stack) };
    let (operation, known) = operation(handle.0[0])
        .zip(KNOWN.get())
        .expect("the operation is known before its kernel is replaced");
    let arguments = stack.last(operation.arguments);
    let around = match operation.plan(known, arguments) {
        Plan::Leave => None,
        Plan::Forget(changed) => Some(Around::Forget(changed, Kept::new())),
        Plan::Compute => Some(operation.before(known, arguments, false)),
    };
    // SAFETY: as PyTorch has called this function.
    unsafe { (operation.on_gpu)(object, handle, keys, stack) };
    if let Some(around) = around {
        around.after(known, known.tensors(stack.last(operation.returns)));
    }
}

/// Computes an operation on small tensors from now on. Returns `false` if the probe has failed or
/// the operation lacks a kernel.
///
/// # Safety
/// The description is true, and the other two are functions of the C++ runtime.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_small_compute(
    description: &Description,
    begin_catch: usize,
    end_catch: usize,
) -> bool {
    let Some(known) = KNOWN.get() else {
        return false;
    };
    CATCH[0].store(begin_catch, Ordering::Relaxed);
    CATCH[1].store(end_catch, Ordering::Relaxed);
    let &Description {
        names,
        arguments,
        returns,
        changed,
        overwritten,
        open,
        kind,
        choice,
        first_step,
        is_indexed,
        types,
    } = description;
    // SAFETY: as the caller promises.
    let ([name, overload], types) = unsafe {
        let names = names.map(|name| CStr::from_ptr(name));
        (names, (!types.is_null()).then(|| CStr::from_ptr(types)))
    };
    let handle = known.torch.find(name, overload);
    let draws = Draws::of(name, overload);
    let kernel = handle.kernel(known.on_gpu);
    let Some(on_gpu) = kernel
        .function()
        .filter(|_| operation(handle.0[0]).is_none())
    else {
        return false;
    };
    let unboxed = Functions::of(kernel);
    if !unboxed.are_known() {
        return false; // Another layout.
    }
    let new = Operation {
        handle,
        on_gpu,
        is_on_cpu: handle.kernel(known.on_cpu).function().is_some(),
        arguments,
        returns,
        changed,
        overwritten: draws.map_or(overwritten, |_| changed),
        open,
        kind: draws.map_or(Kind::ALL[kind], |_| Kind::Drawn),
        choice: Choice::ALL[choice],
        first_step,
        is_indexed: is_indexed == 1,
        direct: Direct::of(name, overload),
        draws,
        refused: Default::default(),
    };
    let Some(slot) = slots(handle.0[0]).find(|slot| slot.load(Ordering::Acquire).is_null()) else {
        return false;
    };
    let new: &Operation = Box::leak(Box::new(new));
    slot.store(ptr::from_ref(new).cast_mut(), Ordering::Release);
    kernel
        .function
        .store(run as *const () as usize, Ordering::Release);
    let entry = types.and_then(|types| unboxed::entry(Some(new), unboxed, types.to_bytes()));
    unboxed.replace(kernel, entry);
    true
}

unsafe extern "C-unwind" {
    /// Calls a function of a kernel. Returns an exception that it throws, or null.
    fn harness_small_try(
        function: usize,
        object: *mut c_void,
        handle: *const Handle,
        keys: u64,
        stack: *mut Stack,
    ) -> *mut c_void;
    fn harness_small_caught();
    fn _Unwind_SetGR(context: *mut c_void, register: c_int, value: usize);
    fn _Unwind_SetIP(context: *mut c_void, address: usize);
}

global_asm!(
    ".p2align 4",
    ".globl harness_small_try",
    ".hidden harness_small_try",
    ".globl harness_small_caught",
    ".hidden harness_small_caught",
    "harness_small_try:",
    ".cfi_startproc",
    ".cfi_personality 0x1b, {personality}",
    "sub rsp, 8",
    ".cfi_adjust_cfa_offset 8",
    "mov rax, rdi",
    "mov rdi, rsi",
    "mov rsi, rdx",
    "mov rdx, rcx",
    "mov rcx, r8",
    "call rax",
    "xor eax, eax",
    "harness_small_caught:",
    "add rsp, 8",
    ".cfi_adjust_cfa_offset -8",
    "ret",
    ".cfi_endproc",
    personality = sym personality,
);

const SEARCHES: c_int = 1;
const IS_HANDLER: c_int = 4;
const FOUND: c_int = 6;
const INSTALL: c_int = 7;
const CONTINUE: c_int = 8;

/// Makes [`harness_small_try`] return each exception. The end of a thread continues.
unsafe extern "C" fn personality(
    _: c_int,
    actions: c_int,
    _: u64,
    exception: *mut c_void,
    context: *mut c_void,
) -> c_int {
    if actions & SEARCHES != 0 {
        return FOUND;
    }
    if actions & IS_HANDLER == 0 {
        return CONTINUE;
    }
    // SAFETY: the unwinder passes its context. Register 0 is rax.
    unsafe {
        _Unwind_SetGR(context, 0, exception.expose_provenance());
        _Unwind_SetIP(context, harness_small_caught as *const () as usize);
    }
    INSTALL
}
