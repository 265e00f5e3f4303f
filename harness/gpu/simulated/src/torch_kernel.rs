//! Runs small operations of PyTorch without Python, for [`Values::Cpu`]: for a few numbers, Python
//! takes most of the time.
//!
//! The Python module `cpu_values` registers a Python kernel for each operation. PyTorch stores a
//! kernel as an object and a function. [`harness_values_compute`] replaces the function by [`run`],
//! which calls the GPU's kernel and then the CPU's, on tensors over the contents of the GPU's
//! memory. [`run`] leaves arguments to the Python kernel until the CPU has accepted arguments of
//! these types there, because Rust cannot catch the exceptions of C++.
//!
//! The layouts here are those of PyTorch 2.4 to 2.15 (`ATen/core/dispatch`, `ATen/core/boxing`,
//! `ATen/core/ivalue.h`, `c10/util/intrusive_ptr.h`). [`harness_values_probe`] finds the rest of
//! them and checks them with an operation made for this purpose. If a check fails, Python runs all
//! operations.
//!
//! [`Values::Cpu`]: harness_gpu_settings::settings::Values::Cpu

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::{cell::Cell, mem, ptr, slice};

use harness_gpu_settings::export;

use crate::backing::harness_values_generation;
use crate::contents;

mod small;

/// Python handles operations on larger tensors, for which its time does not matter.
const MOST_BYTES: u64 = 1 << 20;
const MOST_ALIASES: usize = 1 << 14;
const MOST_ARGUMENTS: usize = 24;
/// Accepted signatures of an operation.
const MOST_SIGNATURES: usize = 16;
/// The words of a tensor's object among which the probe looks for its dispatch keys. The object has
/// 24 words in PyTorch 2.4, later 23.
const MOST_OF_TENSOR: usize = 24;
const INLINE_DIMENSIONS: usize = 5;
/// The words of a storage among which the probe looks for the address of its memory.
const MOST_OF_STORAGE: usize = 8;
/// The words of an operation's definition among which the probe looks for its kernels. Its table
/// has up to 200 kernels of 32 or 40 bytes.
const MOST_OF_DEFINITION: usize = 1 << 11;
/// The most slots of an operation's map of registered kernels, and the words of a slot.
const MOST_SLOTS: usize = 1 << 8;
const SLOT: usize = 5;
/// The words of a list element among which its kernel is.
const REGISTERED: usize = 8;

/// A `c10::OperatorHandle`: the address of the operation's definition and another word. C++ returns
/// it through a pointer, because it has a destructor. With four words, Rust does the same.
#[repr(C)]
#[derive(Clone, Copy)]
struct Handle([usize; 4]);

type Function = unsafe extern "C-unwind" fn(*mut c_void, *const Handle, u64, *mut Stack);

/// The first words of a `c10::KernelFunction`.
#[repr(C)]
struct Kernel {
    object: *mut c_void,
    /// A [`Function`], or 0.
    function: AtomicUsize,
    /// Functions that take unboxed arguments, or 0. The second one takes symbols for integers.
    unboxed: [AtomicUsize; 2],
}

/// A `std::vector` of values.
#[repr(C)]
struct Stack {
    start: *mut Value,
    end: *mut Value,
    capacity_end: *mut Value,
}

/// A `c10::IValue`. An object's payload is its address.
#[repr(C)]
#[derive(Clone, Copy)]
struct Value {
    payload: usize,
    tag: u32,
}

impl Value {
    const fn new(tag: u32, payload: usize) -> Self {
        Self { payload, tag }
    }
}

const NONE: u32 = 0;
const TENSOR: u32 = 1;
const DOUBLE: u32 = 3;
const INT: u32 = 5;

/// A `c10::detail::ListImpl`.
#[repr(C)]
struct List {
    functions: usize,
    counts: AtomicU64,
    elements: Stack,
    element_type: [usize; 2],
}

impl List {
    const fn empty() -> Self {
        Self {
            functions: 0,
            counts: AtomicU64::new(1 | 1 << 32),
            elements: Stack {
                start: ptr::null_mut(),
                end: ptr::null_mut(),
                capacity_end: ptr::null_mut(),
            },
            element_type: [0; 2],
        }
    }

    /// The tags and payloads of numbers and flags.
    fn numbers(&self, bool_tag: u32) -> Vec<(u32, u64)> {
        let elements = self.elements.all().iter();
        let number = |element: &Value| match element.tag {
            tag if tag == bool_tag => (tag, u64::from(element.payload as u8)),
            tag => (tag, element.payload as u64),
        };
        elements.map(number).collect()
    }

    /// A list of this type, which needs no reference to the type.
    fn empty_like(&self) -> Self {
        self.over(&mut [])
    }

    /// A list of this type with these elements, which it does not keep.
    fn over(&self, elements: &mut [Value]) -> Self {
        let elements = elements.as_mut_ptr_range();
        Self {
            functions: self.functions,
            element_type: self.element_type,
            elements: Stack {
                start: elements.start,
                end: elements.end,
                capacity_end: elements.end,
            },
            ..Self::empty()
        }
    }
}

// SAFETY: the lists that are shared have no elements.
unsafe impl Sync for List {}
// SAFETY: as above.
unsafe impl Send for List {}

type Get<T> = unsafe extern "C" fn(*const usize, *mut T) -> i32;

/// Functions of PyTorch, and sets of dispatch keys.
#[repr(C)]
#[derive(Clone, Copy)]
struct Torch {
    dispatcher: unsafe extern "C" fn() -> *mut c_void,
    find: unsafe extern "C-unwind" fn(*mut c_void, *const c_char, *const c_char) -> Handle,
    /// The address of the object of all undefined tensors.
    undefined: usize,
    address: Get<usize>,
    dimensions: Get<i64>,
    sizes: Get<usize>,
    strides: Get<usize>,
    scalar_type: Get<i32>,
    from_blob: unsafe extern "C" fn(
        usize,
        i64,
        *const i64,
        *const i64,
        i64,
        i32,
        i32,
        i32,
        *mut *mut usize,
    ) -> i32,
    delete: unsafe extern "C" fn(*mut usize) -> i32,
    /// Makes another `at::Tensor` of an object. PyTorch 2.9 has it.
    copy: Option<unsafe extern "C" fn(*const usize, *mut *mut usize) -> i32>,
    /// The keys of dense tensors of the GPU and of the CPU.
    gpu_keys: u64,
    cpu_keys: u64,
    /// The keys below autograd that an operation on plain tensors may have besides.
    other_keys: u64,
    /// The keys of the probe's tensor.
    probe_keys: u64,
    /// The keys of plain tensors. With others, a tensor is for example sparse, or conjugated when
    /// it is read.
    plain_keys: u64,
}

/// PyTorch, and what the probe has found.
struct Known {
    torch: Torch,
    /// The offsets of kernels in the definition of an operation: Python's kernel, the GPU's and the
    /// CPU's.
    in_python: usize,
    on_gpu: usize,
    on_cpu: usize,
    /// The offset of the map of registered kernels in the definition.
    map: usize,
    /// The offsets of the dispatch keys, of the number of elements and of the shape in the object
    /// of a tensor.
    keys: usize,
    elements: usize,
    shape: usize,
    /// The offsets of the storage in the object of a tensor, and of the address in the storage.
    /// `None` if only PyTorch finds the address.
    storage: Option<[usize; 2]>,
    /// Lists of tensors, integers, numbers and flags, which belong to nobody.
    lists: [List; 4],
    bool_tag: u32,
    list_tag: u32,
    device_tag: u32,
    string_tag: u32,
    copy: Handle,
}

/// How the CPU's results reach the tensors of the program.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Results {
    /// The CPU's operation changes an argument.
    Changed,
    /// The CPU's operation writes into a tensor, its last argument.
    Written,
    /// The results of the CPU are copied.
    Copied,
    /// The CPU's number replaces the GPU's.
    Number,
}

impl Results {
    const ALL: [Self; 4] = [Self::Changed, Self::Written, Self::Copied, Self::Number];
}

/// An operation, as `cpu_values` describes it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Description {
    /// Name and overload of the operation, and of the one that computes its values on the CPU.
    names: [[*const c_char; 2]; 2],
    arguments: usize,
    returns: usize,
    /// An index of [`Results::ALL`].
    results: usize,
    /// The index of the argument that requests pinned memory. Without one, `arguments`.
    pins: usize,
    /// The CPU accepts all integers. A division by zero is an error there.
    takes_integers: bool,
    /// The signature includes numbers, because the CPU may refuse some, for example a layout.
    is_particular: bool,
}

struct Operation {
    on_cpu: Handle,
    /// The function of the Python kernel.
    python: Function,
    results: Results,
    description: Description,
    /// Signatures of arguments that the CPU has accepted, and zeros.
    accepted: [AtomicU64; MOST_SIGNATURES],
}

// SAFETY: the names of the description are not read.
unsafe impl Sync for Operation {}

/// Tensors of the CPU over the contents of the GPU's memory, as addresses of an `at::Tensor`.
#[derive(Default)]
struct Aliases {
    /// The `harness_values_generation` for which they are valid.
    generation: u64,
    /// By address, type, sizes and strides.
    by_key: HashMap<Vec<i64>, usize>,
}

static KNOWN: OnceLock<Known> = OnceLock::new();
/// By the address of its definition.
static OPERATIONS: LazyLock<RwLock<HashMap<usize, &'static Operation>>> =
    LazyLock::new(RwLock::default);
static ALIASES: LazyLock<Mutex<Aliases>> = LazyLock::new(Mutex::default);
/// The number of operations for whose results host memory did not suffice.
static BEYOND_LIMIT: AtomicU64 = AtomicU64::new(0);

impl Torch {
    fn find(&self, name: &CStr, overload: &CStr) -> Handle {
        // SAFETY: the functions have these types in C++. The caller names an operation that exists,
        // so nothing is thrown.
        unsafe { (self.find)((self.dispatcher)(), name.as_ptr(), overload.as_ptr()) }
    }

    fn is_defined(&self, value: Value) -> bool {
        value.tag == TENSOR && value.payload != self.undefined
    }

    /// Sizes and strides.
    fn shape(&self, tensor: &Value) -> Option<[&[i64]; 2]> {
        let dimensions = get(self.dimensions, tensor)? as usize;
        let slice = |of| {
            let start = ptr::with_exposed_provenance(get(of, tensor)?);
            Some(if dimensions == 0 {
                &[][..]
            } else {
                // SAFETY: a tensor has a size and a stride for each dimension. It outlives the
                // value, and its shape does not change while the slices exist.
                unsafe { slice::from_raw_parts(start, dimensions) }
            })
        };
        Some([slice(self.sizes)?, slice(self.strides)?])
    }
}

fn get<T: Default>(get: Get<T>, tensor: &Value) -> Option<T> {
    let mut value = T::default();
    // SAFETY: the payload of a value with a defined tensor is an `at::Tensor`, and the function
    // writes this type.
    (unsafe { get(&raw const tensor.payload, &raw mut value) } == 0).then_some(value)
}

/// The size of an element of a `c10::ScalarType`. `None` for quantized types and parts of bytes,
/// which Python handles.
const fn element_size(scalar_type: i32) -> Option<u64> {
    Some(match scalar_type {
        0 | 1 | 11 | 23..=26 | 44 | 45 => 1,
        2 | 5 | 15 | 27 => 2,
        3 | 6 | 8 | 28 | 46 => 4,
        4 | 7 | 9 | 29 => 8,
        10 => 16,
        _ => return None,
    })
}

const fn is_integer(scalar_type: i32) -> bool {
    matches!(scalar_type, 0..=4 | 27..=29)
}

const fn is_complex(scalar_type: i32) -> bool {
    matches!(scalar_type, 8..=10 | 46)
}

impl Handle {
    fn kernel(&self, offset: usize) -> &'static Kernel {
        // SAFETY: definitions last as long as PyTorch. The probe has found a kernel at this offset.
        unsafe { &*ptr::with_exposed_provenance(self.0[0] + offset) }
    }
}

impl Kernel {
    fn function(&self) -> Option<Function> {
        let address = self.function.load(Ordering::Acquire);
        // SAFETY: the function of a kernel has this type, or is null.
        unsafe { mem::transmute::<usize, Option<Function>>(address) }
    }
}

/// Adds a reference to a `c10::intrusive_ptr_target`. Returns `false` if this would be the second
/// reference to a tensor that Python has too: then only PyTorch can add it.
fn retain(object: usize) -> bool {
    let counts = counts(object);
    let before = counts.fetch_add(1, Ordering::Relaxed);
    let is_known_to_python = before >> 63 == 1;
    if is_known_to_python && before as u32 == 1 {
        counts.fetch_sub(1, Ordering::Relaxed);
        return false;
    }
    true
}

/// Removes a reference to an object that keeps others.
fn release(object: usize) {
    counts(object).fetch_sub(1, Ordering::AcqRel);
}

fn counts(object: usize) -> &'static AtomicU64 {
    // SAFETY: the counts follow the address of the virtual functions. The caller has a reference to
    // the object.
    unsafe { &*ptr::with_exposed_provenance(object + size_of::<usize>()) }
}

impl Aliases {
    /// Locks the aliases, and removes outdated ones. While they are locked, none is removed.
    fn lock(torch: &Torch) -> MutexGuard<'static, Self> {
        let mut aliases = ALIASES.lock().unwrap_or_else(PoisonError::into_inner);
        let generation = harness_values_generation.load(Ordering::Relaxed);
        if generation != aliases.generation || aliases.by_key.len() >= MOST_ALIASES {
            for (_, alias) in mem::take(&mut aliases.by_key) {
                // SAFETY: `from_blob` returned it, and it is gone from the table.
                unsafe { (torch.delete)(ptr::with_exposed_provenance_mut(alias)) };
            }
            aliases.generation = generation;
        }
        aliases
    }

    /// The CPU's tensor for a defined tensor of the GPU, and its size. `None` if Python has to
    /// handle the tensor.
    fn alias(&mut self, torch: &Torch, tensor: &Value) -> Option<(Value, u64)> {
        let scalar_type = get(torch.scalar_type, tensor)?;
        let (address, [sizes, strides]) = (get(torch.address, tensor)?, torch.shape(tensor)?);
        let element_size = element_size(scalar_type)?;
        let elements = sizes.iter().product::<i64>() as u64;
        if elements == 0 || address == 0 {
            return None;
        }
        let key = [&[address as i64, i64::from(scalar_type)], sizes, strides].concat();
        let alias = match self.by_key.get(&key) {
            Some(alias) => *alias,
            None => {
                let mut range = [0; 3];
                let last: i64 = sizes
                    .iter()
                    .zip(strides)
                    .map(|(size, stride)| (size - 1) * stride)
                    .sum();
                if !contents::harness_values_range(address as u64, &mut range) {
                    return None;
                }
                let [start, size, host] = range;
                let offset = address as u64 - start;
                if offset + (last as u64 + 1) * element_size > size {
                    return None;
                }
                let mut alias = ptr::null_mut();
                let data = (host + offset) as usize;
                // SAFETY: the contents are mapped until the generation changes, and the tensor's
                // elements lie in them.
                let code = unsafe {
                    (torch.from_blob)(
                        data,
                        sizes.len() as i64,
                        sizes.as_ptr(),
                        strides.as_ptr(),
                        0,
                        scalar_type,
                        0,
                        0,
                        &raw mut alias,
                    )
                };
                if code != 0 {
                    return None;
                }
                let alias = alias.expose_provenance();
                self.by_key.insert(key, alias);
                alias
            }
        };
        // SAFETY: an `at::Tensor` is the address of its object.
        let payload = unsafe { *ptr::with_exposed_provenance::<usize>(alias) };
        Some((
            Value {
                payload,
                tag: TENSOR,
            },
            elements * element_size,
        ))
    }
}

impl Stack {
    /// Copies values into memory of the allocator that C++ uses.
    fn new(values: &[Value], capacity: usize) -> Self {
        // SAFETY: the values fit into the allocation.
        unsafe {
            let start = libc::malloc(capacity.max(1) * size_of::<Value>()).cast::<Value>();
            assert!(!start.is_null(), "no memory for {capacity} values");
            ptr::copy_nonoverlapping(values.as_ptr(), start, values.len());
            Self {
                start,
                end: start.add(values.len()),
                capacity_end: start.add(capacity),
            }
        }
    }

    fn all(&self) -> &[Value] {
        if self.start.is_null() {
            &[]
        } else {
            // SAFETY: the values from start to end are initialized. An empty std::vector has null
            // pointers.
            unsafe { slice::from_raw_parts(self.start, self.end.offset_from_unsigned(self.start)) }
        }
    }

    fn last(&mut self, count: usize) -> &mut [Value] {
        if count == 0 {
            return &mut []; // The pointers may be null.
        }
        // SAFETY: the stack ends with this number of values, as the callers know.
        unsafe { slice::from_raw_parts_mut(self.end.sub(count), count) }
    }
}

/// The arguments of an operation of the CPU, and afterwards its results, with a reference to each
/// object.
struct Values {
    stack: Stack,
    /// Lists of tensors made for the CPU.
    lists: Vec<*mut List>,
}

impl Values {
    /// The values, and room for one more. `None` if PyTorch has to add a reference.
    fn new(values: &[Value], lists: Vec<*mut List>, known: &Known) -> Option<Self> {
        let mut this = Self {
            stack: Stack::new(&[], values.len() + 1),
            lists,
        };
        values
            .iter()
            .all(|value| this.push(*value, known))
            .then_some(this)
    }

    fn push(&mut self, value: Value, known: &Known) -> bool {
        if self.stack.end == self.stack.capacity_end
            || (known.is_object(value) && !known.retain(&value))
        {
            return false;
        }
        // SAFETY: there is room for the value.
        unsafe {
            self.stack.end.write(value);
            self.stack.end = self.stack.end.add(1);
        }
        true
    }

    /// Replaces the arguments by the results of the CPU.
    ///
    /// # Safety
    /// The operation takes these arguments.
    unsafe fn compute(&mut self, operation: &Handle, known: &Known) {
        // SAFETY: as the caller promises.
        unsafe {
            call(
                operation,
                known.on_cpu,
                known.torch.cpu_keys,
                &raw mut self.stack,
            )
        };
    }
}

impl Drop for Values {
    /// Removes the references. Every object has others.
    fn drop(&mut self) {
        let known = KNOWN.get().expect("values exist after the probe");
        known.release(&self.stack);
        // SAFETY: `new` or C++ has allocated it with this allocator.
        unsafe { libc::free(self.stack.start.cast()) };
        self.lists.drain(..).for_each(|list| free(list, known));
    }
}

/// Makes a list of tensors, each with a reference already, of the type of another list.
fn list_of(tensors: &[Value], like: &List) -> *mut List {
    let elements = Stack::new(tensors, tensors.len());
    // SAFETY: the allocation has the size of a list.
    unsafe {
        let list = libc::malloc(size_of::<List>()).cast::<List>();
        assert!(!list.is_null(), "no memory for a list");
        list.write(List {
            elements,
            ..like.empty_like()
        });
        list
    }
}

/// Frees a list of [`list_of`]. C++ never frees it, because this reference is the last. The type of
/// the elements therefore needs no reference.
fn free(list: *mut List, known: &Known) {
    // SAFETY: the list exists.
    let (counts, elements) = unsafe { (&(*list).counts, &(*list).elements) };
    if counts.load(Ordering::Acquire) as u32 != 1 {
        return; // An operation keeps it.
    }
    known.release(elements);
    // SAFETY: nothing else has a reference.
    unsafe {
        libc::free(elements.start.cast());
        libc::free(list.cast());
    }
}

/// Calls the kernel of an operation.
///
/// # Safety
/// The operation takes the last values of the stack.
unsafe fn call(operation: &Handle, offset: usize, keys: u64, stack: *mut Stack) {
    let kernel = operation.kernel(offset);
    let function = kernel
        .function()
        .expect("harness_values_compute has checked the kernel, and PyTorch removes none");
    // SAFETY: kernels have this signature. The caller vouches for the stack.
    unsafe { function(kernel.object, operation, keys, stack) };
}

/// While this exists, the thread runs one operation, and the operations that it calls do not
/// arrive.
struct Inside(c_int);

impl Inside {
    fn enter() -> Self {
        Self(contents::harness_values_enter())
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        contents::harness_values_leave(self.0);
    }
}

/// How an operation runs.
enum Plan {
    /// On the CPU, because no tensor is on the GPU.
    OnCpu,
    /// First the kernel at this offset with these keys, for the GPU, then the CPU with these
    /// arguments.
    OnBoth(usize, u64, Values),
    /// In Python, which reports whether the CPU accepts arguments with this signature.
    InPython(Option<u64>),
}

/// A hash (FNV-1a on words, with a rotation) of what decides whether the CPU accepts arguments,
/// such as types.
struct Signature(u64);

impl Signature {
    fn add(&mut self, word: u64) {
        self.0 = (self.0 ^ word)
            .wrapping_mul(0x0000_0100_0000_01b3)
            .rotate_left(29);
    }
}

/// Makes the arguments for the CPU.
struct Arguments<'a> {
    known: &'a Known,
    operation: &'a Operation,
    aliases: &'a mut Aliases,
    signature: Signature,
    lists: Vec<*mut List>,
}

impl Arguments<'_> {
    /// The CPU's tensor. `None` if Python has to run the operation.
    fn tensor(&mut self, value: &Value) -> Option<Value> {
        let torch = &self.known.torch;
        if !torch.is_defined(*value) {
            return Some(*value);
        }
        let is_on_gpu = self.known.is_on_gpu(value)?;
        let scalar_type = get(torch.scalar_type, value)?;
        let is_divided = is_integer(scalar_type) && !self.operation.description.takes_integers;
        // A complex number is an object, unlike others.
        if is_divided || (self.operation.results == Results::Number && is_complex(scalar_type)) {
            return None;
        }
        self.signature
            .add(scalar_type as u64 | u64::from(is_on_gpu) << 8);
        if !is_on_gpu {
            return Some(*value);
        }
        let (alias, size) = self.aliases.alias(torch, value)?;
        (size < MOST_BYTES).then_some(alias)
    }

    fn value(&mut self, index: usize, value: &Value) -> Option<Value> {
        let known = self.known;
        self.signature.add(u64::from(value.tag));
        match value.tag {
            TENSOR => self.tensor(value),
            tag if tag == known.list_tag => {
                // SAFETY: a value with this tag has the address of a list.
                let list = unsafe { &*ptr::with_exposed_provenance::<List>(value.payload) };
                let elements = list.elements.all();
                if !elements.iter().any(|element| element.tag == TENSOR) {
                    return Some(*value);
                }
                let mut tensors = Vec::with_capacity(elements.len());
                for element in elements {
                    self.signature.add(u64::from(element.tag));
                    tensors.push(self.tensor(element)?);
                }
                let retained = tensors
                    .iter()
                    .take_while(|tensor| !known.is_object(**tensor) || known.retain(tensor))
                    .count();
                let list = list_of(&tensors[..retained], list);
                self.lists.push(list);
                (retained == tensors.len()).then_some(Value {
                    payload: list.expose_provenance(),
                    tag,
                })
            }
            tag if tag == known.device_tag => {
                self.signature.add(value.payload as u8 as u64);
                Some(Value { payload: CPU, tag })
            }
            _ if self.operation.description.pins == index
                && value.payload as u8 == 1
                && value.tag == known.bool_tag =>
            {
                None
            }
            NONE | DOUBLE => Some(*value),
            tag if tag == INT || tag == known.bool_tag => {
                if self.operation.description.is_particular {
                    self.signature.add(value.payload as u64);
                }
                Some(*value)
            }
            _ => None,
        }
    }
}

/// The payload of a `c10::Device` for the CPU: type 0 and index -1.
const CPU: usize = 0xff00;

impl Operation {
    fn plan(&self, known: &Known, handle: &Handle, keys: u64, arguments: &[Value]) -> Plan {
        let has_cpu_kernel = handle.kernel(known.on_cpu).function().is_some();
        let Torch {
            cpu_keys,
            gpu_keys,
            other_keys,
            ..
        } = known.torch;
        let keys = keys & !other_keys;
        let creates_on_gpu = arguments
            .iter()
            .any(|value| value.tag == known.device_tag && value.payload as u8 != 0);
        let (offset, keys) = match keys {
            keys if keys == cpu_keys && !has_cpu_kernel => return Plan::InPython(None),
            keys if keys == cpu_keys && !creates_on_gpu => return Plan::OnCpu,
            keys if keys == cpu_keys => (known.on_cpu, keys),
            0 if creates_on_gpu => (known.on_gpu, gpu_keys),
            keys if keys | cpu_keys == gpu_keys | cpu_keys && keys != cpu_keys => {
                (known.on_gpu, keys)
            }
            _ => return Plan::InPython(None),
        };
        if contents::harness_values_captures.load(Ordering::Relaxed) > 0 {
            return Plan::InPython(None);
        }
        let mut aliases = Aliases::lock(&known.torch);
        let mut for_cpu = Arguments {
            known,
            operation: self,
            aliases: &mut aliases,
            signature: Signature(keys),
            lists: Vec::new(),
        };
        let mut values = [Value {
            payload: 0,
            tag: NONE,
        }; MOST_ARGUMENTS];
        for (index, (into, value)) in values.iter_mut().zip(arguments).enumerate() {
            match for_cpu.value(index, value) {
                Some(value) => *into = value,
                None => {
                    for_cpu.lists.drain(..).for_each(|list| free(list, known));
                    return Plan::InPython(None);
                }
            }
        }
        let signature = for_cpu.signature.0;
        let values = Values::new(&values[..arguments.len()], for_cpu.lists, known);
        match values.filter(|_| {
            self.accepted
                .iter()
                .any(|accepted| accepted.load(Ordering::Relaxed) == signature)
        }) {
            Some(values) => Plan::OnBoth(offset, keys, values),
            None => Plan::InPython(Some(signature)),
        }
    }

    /// Computes the results that the GPU's kernel has left on the stack.
    ///
    /// # Safety
    /// The values are the arguments of the operation.
    unsafe fn compute(&self, known: &Known, mut values: Values, stack: &mut Stack) {
        let results = stack.last(self.description.returns);
        if self.results == Results::Written {
            let mut aliases = Aliases::lock(&known.torch);
            if !known
                .for_result(&results[0], &mut aliases)
                .is_some_and(|into| values.push(into, known))
            {
                return;
            }
        }
        // SAFETY: as the caller promises. An operation that writes its result takes the tensor for
        // it as its last argument.
        unsafe { values.compute(&self.on_cpu, known) };
        match self.results {
            Results::Changed | Results::Written => {}
            Results::Number => results.copy_from_slice(values.stack.all()),
            Results::Copied => {
                // `take_over` removes their references.
                let computed = mem::replace(&mut values.stack.end, values.stack.start);
                let computed = Stack {
                    end: computed,
                    ..values.stack
                };
                results
                    .iter()
                    .zip(computed.all())
                    .for_each(|(own, computed)| known.take_over(*own, *computed));
            }
        }
    }
}

impl Known {
    /// Returns whether a defined tensor is on the GPU. `None` if it is not plain.
    fn is_on_gpu(&self, tensor: &Value) -> Option<bool> {
        // SAFETY: the probe has found the keys at this offset.
        let keys = unsafe { *ptr::with_exposed_provenance::<u64>(tensor.payload + self.keys) };
        let Torch {
            gpu_keys,
            cpu_keys,
            plain_keys,
            ..
        } = self.torch;
        (keys & !plain_keys == 0).then_some(keys & gpu_keys & !cpu_keys != 0)
    }

    /// The number of elements of a defined tensor.
    fn elements(&self, tensor: &Value) -> u64 {
        // SAFETY: the probe has found the number at this offset.
        unsafe { *ptr::with_exposed_provenance(tensor.payload + self.elements) }
    }

    /// The `c10::ScalarType` of a defined tensor, which follows the number of elements.
    fn scalar_type(&self, tensor: &Value) -> i32 {
        let place = tensor.payload + self.elements + size_of::<u64>();
        // SAFETY: the probe has found the type there.
        unsafe { *ptr::with_exposed_provenance::<u16>(place) }.into()
    }

    /// The address of the first element of a defined plain tensor that has elements.
    fn address(&self, tensor: &Value) -> Option<u64> {
        let Some([storage, address]) = self.storage else {
            return get::<usize>(self.torch.address, tensor).map(|address| address as u64);
        };
        // SAFETY: the probe has found these words in the objects of a tensor and of its storage.
        let word = |object: usize, offset: usize| unsafe {
            *ptr::with_exposed_provenance::<usize>(object + offset)
        };
        let storage = Some(word(tensor.payload, storage)).filter(|storage| *storage > 0)?;
        let first = word(tensor.payload, self.elements - size_of::<usize>()) as u64;
        Some(word(storage, address) as u64 + first * element_size(self.scalar_type(tensor))?)
    }

    /// Sizes and strides of a defined plain tensor.
    fn shape(&self, tensor: &Value) -> [&[i64]; 2] {
        let start = ptr::with_exposed_provenance::<usize>(tensor.payload + self.shape);
        // SAFETY: the probe has found a `c10::impl::SizesAndStrides` there: the number of
        // dimensions, then memory for the sizes and strides of five, or an address of more. Both
        // outlive the value, and do not change while the slices exist.
        unsafe {
            let dimensions = start.read();
            let (sizes, most) = match dimensions {
                0..=INLINE_DIMENSIONS => (start.add(1).cast::<i64>(), INLINE_DIMENSIONS),
                _ => (
                    ptr::with_exposed_provenance(start.add(1).read()),
                    dimensions,
                ),
            };
            [sizes, sizes.add(most)].map(|start| slice::from_raw_parts(start, dimensions))
        }
    }

    fn is_object(&self, value: Value) -> bool {
        self.torch.is_defined(value) || [self.list_tag, self.string_tag].contains(&value.tag)
    }

    /// Adds a reference to an object, with PyTorch if only it can.
    fn retain(&self, value: &Value) -> bool {
        let copy = |copy: unsafe extern "C" fn(*const usize, *mut *mut usize) -> i32| {
            let mut holder = ptr::null_mut();
            // SAFETY: the payload of a tensor is an `at::Tensor`. C++ allocates the holder with the
            // same allocator, and the reference outlives it.
            unsafe {
                let is_copied = copy(&raw const value.payload, &raw mut holder) == 0;
                libc::free(holder.cast());
                is_copied
            }
        };
        retain(value.payload) || (value.tag == TENSOR && self.torch.copy.is_some_and(copy))
    }

    /// Removes a reference to each object of the values.
    fn release(&self, values: &Stack) {
        values
            .all()
            .iter()
            .filter(|value| self.is_object(**value))
            .for_each(|value| release(value.payload));
    }

    /// The tensor of the CPU for a result. `None` if it is empty, and if the result is counted as
    /// not computed.
    fn for_result(&self, result: &Value, aliases: &mut Aliases) -> Option<Value> {
        let [sizes, _] = self.torch.shape(result)?;
        if sizes.contains(&0) {
            return None;
        }
        let alias = self.is_on_gpu(result).and_then(|is_on_gpu| {
            if is_on_gpu {
                aliases.alias(&self.torch, result)
            } else {
                Some((*result, 0))
            }
        });
        let Some((alias, size)) = alias else {
            contents::not_computed();
            return None;
        };
        if size >= MOST_BYTES && !contents::harness_values_fit(2 * size) {
            BEYOND_LIMIT.fetch_add(1, Ordering::Relaxed);
            contents::harness_values_clear(get(self.torch.address, result)? as u64, size);
            return None;
        }
        Some(alias)
    }

    /// Copies a result of the CPU into the program's, and frees the CPU's.
    fn take_over(&self, own: Value, computed: Value) {
        let torch = &self.torch;
        if !torch.is_defined(computed) {
            return;
        }
        let sizes = |tensor| torch.shape(tensor).map(|[sizes, _]| sizes);
        if torch.is_defined(own) && sizes(&own) == sizes(&computed) {
            let mut aliases = Aliases::lock(torch);
            let is_non_blocking = Value {
                payload: 0,
                tag: self.bool_tag,
            };
            let into = self.for_result(&own, &mut aliases);
            let arguments = into
                .and_then(|into| Values::new(&[into, computed, is_non_blocking], Vec::new(), self));
            drop(aliases);
            if let Some(mut arguments) = arguments {
                // SAFETY: these are the arguments of `copy_`.
                unsafe { arguments.compute(&self.copy, self) };
            }
        }
        // SAFETY: C++ frees the memory with the same allocator. The tensor has one reference from
        // here.
        unsafe {
            let holder = libc::malloc(size_of::<usize>()).cast::<usize>();
            holder.write(computed.payload);
            (torch.delete)(holder);
        }
    }
}

thread_local! {
    /// The operation that Python runs in this thread, the signature of its arguments, and the
    /// number of runs that had ended before.
    static IN_PYTHON: Cell<Option<(&'static Operation, u64, u64)>> = const { Cell::new(None) };
}

/// The function of kernels that [`harness_values_compute`] has replaced.
unsafe extern "C-unwind" fn run(
    object: *mut c_void,
    handle: *const Handle,
    keys: u64,
    stack: *mut Stack,
) {
    // SAFETY: PyTorch passes a handle and a stack, and nothing else uses the stack during the call.
    let (handle, stack) = unsafe { (&*handle, &mut *stack) };
    let operations = OPERATIONS.read().unwrap_or_else(PoisonError::into_inner);
    let operation = operations.get(&handle.0[0]).copied();
    drop(operations);
    let (operation, known) = operation
        .zip(KNOWN.get())
        .expect("the operation is known before its kernel is replaced");
    match operation.plan(
        known,
        handle,
        keys,
        stack.last(operation.description.arguments),
    ) {
        Plan::InPython(signature) => {
            IN_PYTHON.set(signature.map(|signature| (operation, signature, contents::ended())));
            // SAFETY: the object is that of the Python kernel, and the rest is as PyTorch has
            // passed it.
            unsafe { (operation.python)(object, handle, keys, stack) };
        }
        Plan::OnCpu => {
            let _inside = Inside::enter();
            // SAFETY: the operation takes the last values of the stack.
            unsafe { call(handle, known.on_cpu, known.torch.cpu_keys, stack) };
        }
        Plan::OnBoth(offset, keys, values) => {
            let _inside = Inside::enter();
            // SAFETY: the operation takes the last values of the stack, and the CPU takes their
            // counterparts.
            unsafe {
                call(handle, offset, keys, stack);
                operation.compute(known, values, stack);
            }
        }
    }
}

/// Reads up to `count` words of the program's memory. Ends where no memory is mapped.
fn words(address: usize, count: usize) -> Vec<usize> {
    let mut words = vec![0; count];
    let size = count * size_of::<usize>();
    let into = libc::iovec {
        iov_base: words.as_mut_ptr().cast(),
        iov_len: size,
    };
    let from = libc::iovec {
        iov_base: ptr::with_exposed_provenance_mut(address),
        iov_len: size,
    };
    // SAFETY: the operating system checks both ranges.
    let read = unsafe {
        libc::process_vm_readv(libc::getpid(), &raw const into, 1, &raw const from, 1, 0)
    };
    words.truncate(usize::try_from(read).unwrap_or(0) / size_of::<usize>());
    words
}

/// Returns whether an address is in a loaded library. `dladdr` would also look for its symbol,
/// which takes long in PyTorch's libraries.
fn is_in_library(address: usize) -> bool {
    unsafe extern "C" fn has(
        object: *mut libc::dl_phdr_info,
        _: usize,
        address: *mut c_void,
    ) -> c_int {
        // SAFETY: the dynamic linker passes an object with this many headers.
        let (start, headers) = unsafe {
            let object = &*object;
            let headers = slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into());
            (object.dlpi_addr, headers)
        };
        let of_object = (address.addr() as u64).wrapping_sub(start);
        let has = |header: &libc::Elf64_Phdr| {
            header.p_type == libc::PT_LOAD
                && of_object.wrapping_sub(header.p_vaddr) < header.p_memsz
        };
        headers.iter().any(has).into()
    }
    // SAFETY: the function has this type, and its argument is no address to it.
    unsafe { libc::dl_iterate_phdr(Some(has), ptr::without_provenance_mut(address)) != 0 }
}

/// Finds the kernels in the definition of an operation whose kernels for the CPU, the GPU and our
/// dispatch key are Python's. Returns their offsets.
fn kernels(definition: usize) -> Option<[usize; 3]> {
    let words = words(definition, MOST_OF_DEFINITION);
    // The kernels of the CPU and the GPU are neighbours, with the same function and different
    // objects.
    (1..words.len()).find_map(|cpu| {
        let [object, function] = [words[cpu - 1], words[cpu]];
        let gpu = (cpu + 4..=cpu + 8).find(|&gpu| words.get(gpu) == Some(&function))?;
        let in_python = (gpu + 1..words.len()).find(|&place| words[place] == function)?;
        let objects = [object, words[gpu - 1], words[in_python - 1]];
        let differ = objects[0] != objects[1]
            && objects[1] != objects[2]
            && objects[0] != objects[2]
            && !objects.contains(&0);
        let fits = is_in_library(function) && differ && (in_python - cpu) % (gpu - cpu) == 0;
        fits.then(|| [cpu, gpu, in_python].map(|place| (place - 1) * size_of::<usize>()))
    })
}

/// Finds the registered kernel whose copy is in the table of an operation. PyTorch compares both
/// before it reports that an operation lacks a kernel. `map`, a `ska::flat_hash_map` of registered
/// kernels, begins with the address of its slots and their number less one. More slots follow for
/// collisions.
fn registered(map: &[usize], copy: &Kernel) -> Option<&'static Kernel> {
    let &[slots, last, ..] = map else { return None };
    if last >= MOST_SLOTS || !(last + 1).is_power_of_two() {
        return None;
    }
    let wanted = [copy.object.addr(), copy.function.load(Ordering::Relaxed)];
    let addresses = words(slots, 2 * (last + 1) * SLOT)
        .into_iter()
        .filter(|address| *address > 0 && address % align_of::<usize>() == 0);
    let address = addresses.into_iter().find_map(|address| {
        let place = words(address, REGISTERED)
            .windows(2)
            .position(|pair| pair == wanted)?;
        Some(address + place * size_of::<usize>())
    })?;
    // SAFETY: a kernel with this object and this function is at the address. `cpu_values` keeps it
    // registered.
    Some(unsafe { &*ptr::with_exposed_provenance(address) })
}

/// The state of the probe until its call.
struct Probe {
    known: Known,
    python: Function,
}

static PROBE: Mutex<Option<Probe>> = Mutex::new(None);

impl Probe {
    /// Checks the arguments of the probe: a tensor of 2 × 3 numbers of the CPU, 1.5, 7, true, a
    /// list of this tensor, the second GPU, the lists 8, 9 and 2.5, 10, a text, and the list true,
    /// false.
    fn checked(mut self, keys: u64, arguments: &[Value]) -> Option<Known> {
        let [
            tensor,
            double,
            int,
            bool,
            list,
            device,
            ints,
            numbers,
            string,
            flags,
        ] = arguments
        else {
            return None;
        };
        (tensor.tag == TENSOR).then(|| self.known.find_places(tensor))??;
        let torch = &self.known.torch;
        let [sizes, strides] = torch.shape(tensor)?;
        let is_tensor = sizes == [2, 3]
            && strides == [3, 1]
            && self.known.shape(tensor) == [sizes, strides]
            && get(torch.scalar_type, tensor) == Some(6)
            && self.known.scalar_type(tensor) == 6;
        let are_numbers = double.tag == DOUBLE
            && f64::from_bits(double.payload as u64) == 1.5
            && int.tag == INT
            && int.payload == 7;
        let is_bool = bool.payload as u8 == 1;
        // SAFETY: the address of an object of C++ that is at least this large.
        let list_of = unsafe { &*ptr::with_exposed_provenance::<List>(list.payload) };
        let is_list = list_of.counts.load(Ordering::Relaxed) as u32 > 0
            && matches!(list_of.elements.all(), [element]
                if element.tag == TENSOR && element.payload == tensor.payload);
        let [ints, numbers, flags] = [ints, numbers, flags].map(|list_value| {
            // SAFETY: as above.
            unsafe { &*ptr::with_exposed_provenance::<List>(list_value.payload) }
        });
        let are_lists = [ints, numbers, flags].map(|list| list.numbers(bool.tag))
            == [
                vec![(INT, 8), (INT, 9)],
                vec![(DOUBLE, 2.5_f64.to_bits()), (INT, 10)],
                vec![(bool.tag, 1), (bool.tag, 0)],
            ];
        let is_device = device.payload as u16 == 0x0101;
        let tags = [
            NONE, TENSOR, DOUBLE, INT, bool.tag, list.tag, device.tag, string.tag,
        ];
        let differ = (1..tags.len()).all(|index| !tags[..index].contains(&tags[index]));
        let are_keys = keys & !torch.other_keys == torch.cpu_keys;
        self.known.lists = [list_of, ints, numbers, flags].map(List::empty_like);
        [
            self.known.bool_tag,
            self.known.list_tag,
            self.known.device_tag,
            self.known.string_tag,
        ] = [bool.tag, list.tag, device.tag, string.tag];
        (is_tensor
            && are_numbers
            && is_bool
            && is_list
            && are_lists
            && is_device
            && differ
            && are_keys)
            .then_some(self.known)
    }
}

impl Known {
    /// Finds what is read in the object of a tensor, with that of the probe.
    fn find_places(&mut self, tensor: &Value) -> Option<()> {
        let object = words(tensor.payload, MOST_OF_TENSOR);
        let only = |is_found: &dyn Fn(&[usize]) -> bool| {
            let mut places = (0..object.len()).filter(|&place| is_found(&object[place..]));
            places.next().filter(|_| places.next().is_none())
        };
        let place = |word: usize| word * size_of::<usize>();
        let shape = only(&|words| matches!(words, [2, 2, 3, _, _, _, 3, 1, ..]))?;
        let elements = only(&|words| words[0] == 6)?;
        self.keys = place(only(&|words| words[0] as u64 == self.torch.probe_keys)?);
        self.elements = place(elements);
        self.shape = place(shape);
        let address: usize = get(self.torch.address, tensor)?;
        let in_storage = |storage: usize| {
            let is_object = storage > 0 && storage.is_multiple_of(align_of::<usize>());
            let words = is_object.then(|| words(storage, MOST_OF_STORAGE));
            words?.iter().position(|word| *word == address)
        };
        let storage = only(&|words| in_storage(words[0]).is_some());
        let storage = storage.and_then(|word| Some([word, in_storage(object[word])?].map(place)));
        // The offset of the first element is between the shape and the number of elements.
        self.storage = storage.filter(|_| elements == shape + 2 + 2 * INLINE_DIMENSIONS);
        Some(())
    }
}

/// The function of the probe's kernel for our dispatch key.
unsafe extern "C-unwind" fn probe(
    object: *mut c_void,
    handle: *const Handle,
    keys: u64,
    stack: *mut Stack,
) {
    let Some(probe) = PROBE.lock().unwrap_or_else(PoisonError::into_inner).take() else {
        return;
    };
    let python = probe.python;
    // SAFETY: PyTorch passes a stack that ends with ten arguments.
    let arguments = unsafe { (*stack).last(10) };
    if let Some(known) = probe.checked(keys, arguments) {
        let _ = KNOWN.set(known);
    }
    // SAFETY: as PyTorch has called this function.
    unsafe { python(object, handle, keys, stack) };
}

/// Prepares the probe, whose next call checks the layouts. Returns whether its kernels are found.
///
/// # Safety
/// The functions are those of PyTorch with these names, and the operation `name` exists.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_values_probe(torch: *const Torch, name: *const c_char) -> bool {
    // SAFETY: as the caller promises.
    let (torch, name) = unsafe { (*torch, CStr::from_ptr(name)) };
    let handle = torch.find(name, c"");
    let Some([on_cpu, on_gpu, in_python]) = kernels(handle.0[0]) else {
        return false;
    };
    let kernel = handle.kernel(in_python);
    let Some(python) = kernel.function() else {
        return false;
    };
    let definition = words(handle.0[0], MOST_OF_DEFINITION);
    let after_table = in_python / size_of::<usize>();
    let Some(map) = (after_table..definition.len())
        .find(|&place| registered(&definition[place..], kernel).is_some())
    else {
        return false;
    };
    let copy = torch.find(c"aten::copy_", c"");
    let map = map * size_of::<usize>();
    let known = Known {
        copy,
        torch,
        in_python,
        on_gpu,
        on_cpu,
        map,
        keys: 0,
        elements: 0,
        shape: 0,
        storage: None,
        lists: [const { List::empty() }; 4],
        bool_tag: 0,
        list_tag: 0,
        device_tag: 0,
        string_tag: 0,
    };
    *PROBE.lock().unwrap_or_else(PoisonError::into_inner) = Some(Probe { known, python });
    kernel
        .function
        .store(probe as *const () as usize, Ordering::Release);
    true
}

/// Runs an operation without Python from now on. Returns `false` if the probe has failed or the
/// operation lacks a kernel.
///
/// # Safety
/// The description is true.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_values_compute(description: &Description) -> bool {
    let Some(known) = KNOWN
        .get()
        .filter(|_| description.arguments <= MOST_ARGUMENTS)
    else {
        return false;
    };
    // SAFETY: as the caller promises.
    let [own, on_cpu] = description.names.map(|name| unsafe {
        known
            .torch
            .find(CStr::from_ptr(name[0]), CStr::from_ptr(name[1]))
    });
    let kernel = own.kernel(known.in_python);
    let has_kernels = own.kernel(known.on_gpu).function().is_some()
        && on_cpu.kernel(known.on_cpu).function().is_some();
    let Some(python) = kernel.function().filter(|_| has_kernels) else {
        return false;
    };
    let Some(registered) = registered(&words(own.0[0] + known.map, 2), kernel) else {
        return false;
    };
    let results = Results::ALL[description.results];
    let operation = Box::leak(Box::new(Operation {
        on_cpu,
        python,
        results,
        description: *description,
        accepted: Default::default(),
    }));
    let mut operations = OPERATIONS.write().unwrap_or_else(PoisonError::into_inner);
    // Another thread may have changed the kernel already.
    operations.entry(own.0[0]).or_insert(operation);
    for kernel in [registered, kernel] {
        kernel
            .function
            .store(run as *const () as usize, Ordering::Release);
    }
    IN_PYTHON.set(None);
    true
}

export! {
    /// Remembers that the CPU accepts the arguments of the operation that Python runs in this
    /// thread.
    harness_values_accepted() -> () = {
        if let Some((operation, signature, ended)) = IN_PYTHON.take()
            && ended == contents::ended()
        {
            let unused = |accepted: &&AtomicU64| {
                accepted
                    .compare_exchange(0, signature, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok()
            };
            let _ = operation.accepted.iter().find(unused);
        }
    };
    /// The number of operations for whose results host memory did not suffice.
    harness_values_beyond_limit() -> u64 = BEYOND_LIMIT.load(Ordering::Relaxed);
}
