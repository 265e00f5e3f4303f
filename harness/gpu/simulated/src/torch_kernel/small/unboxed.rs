//! Calls of operations that pass arguments as C++ does. Most calls do, and to put their arguments
//! on a stack of values would cost more than all else here.
//!
//! [`entry`] gives an operation a function of its own. It saves the registers and calls [`enter`],
//! which finds the arguments by the calling convention of System V for x86-64 and the types of
//! PyTorch's C++ functions (`ATen/core/boxing/KernelFunction_impl.h`, `torchgen/api/native.py`).
//!
//! `small_values` tests this when it starts: [`harness_small_watch`] describes what a call of the
//! CPU passes and returns. If it is not what Python has passed, calls are boxed.

use std::arch::global_asm;
use std::cell::RefCell;
use std::ffi::{CStr, c_char};
use std::fmt::Write as _;
use std::mem::{MaybeUninit, offset_of};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::{ptr, slice};

use super::{Around, KNOWN, Kept, Known, List, Operation, Plan};
use crate::torch_kernel::{
    DOUBLE, INT, Kernel, MOST_ARGUMENTS, NONE, TENSOR, Value, is_in_library,
};

/// Functions for operations. `harness_small_entries` has as many.
const MOST_ENTRIES: usize = 1 << 11;
const ENTRY_SIZE: usize = 16;
const INTEGERS: usize = 6;
const DOUBLES: usize = 8;
/// The size of a `c10::Scalar`: a tag, then, at its half, a number.
const NUMBER: usize = 32;
/// A value of a type that the CPU is not given.
const OTHER: Value = Value::new(u32::MAX, 0);

/// By entry. Without an operation, its calls are described.
static OPERATIONS: [AtomicPtr<(Option<&'static Operation>, Types)>; MOST_ENTRIES] =
    [const { AtomicPtr::new(ptr::null_mut()) }; MOST_ENTRIES];
static USED: AtomicUsize = AtomicUsize::new(0);

/// The state of a call: saved registers, then what the assembler code reads and writes.
#[repr(C)]
struct Call {
    integers: [u64; INTEGERS],
    doubles: [u64; DOUBLES],
    stack: *const u64,
    /// The GPU's kernel.
    function: usize,
    results: [u64; 2],
}

#[derive(Clone, Copy)]
enum Place {
    Integer(usize),
    Double(usize),
    Stack(usize),
}

/// The type of an argument.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Type {
    Tensor,
    OptionalTensor,
    Tensors,
    /// A `c10::List`, which is an object already.
    OptionalTensors,
    Number,
    OptionalNumber,
    Numbers,
    Int,
    OptionalInt,
    /// An object, which has the address of a symbol instead of a number only in traces.
    Symbol,
    OptionalSymbol,
    Float,
    OptionalFloat,
    Bool,
    OptionalBool,
    /// A `std::array` with this many flags.
    Bools(usize),
    OptionalDevice,
    OptionalGenerator,
    Kind,
    OptionalKind,
    Ints,
    OptionalInts,
}

enum Results {
    /// None, or a number.
    None,
    /// A reference to a tensor.
    Reference,
    /// This many tensors, at an address that the caller passes. A tuple has the last one first.
    Tensors(usize),
    /// A `std::vector`, at an address that the caller passes.
    Vector,
}

/// The functions of a kernel that take unboxed arguments, or 0: with numbers, and with symbols.
#[derive(Clone, Copy)]
pub(super) struct Functions(pub [usize; 2]);

impl Functions {
    pub(super) fn of(kernel: &Kernel) -> Self {
        let functions = kernel.unboxed.each_ref();
        Self(functions.map(|function| function.load(Ordering::Acquire)))
    }

    const fn only(self) -> Option<usize> {
        match self.0 {
            [0, 0] => None,
            [0, function] | [function, 0] => Some(function),
            [_, _] => None,
        }
    }

    const fn takes_symbols(self) -> bool {
        self.0[0] == 0
    }

    /// Returns whether each is code.
    pub(super) fn are_known(self) -> bool {
        let is_known = |function: &usize| *function == 0 || is_in_library(*function);
        self.0.iter().all(is_known)
    }

    /// Replaces the only one, or removes them: then PyTorch boxes arguments.
    pub(super) fn replace(self, kernel: &Kernel, by: Option<usize>) {
        let own = usize::from(self.takes_symbols());
        kernel.unboxed[own].store(by.unwrap_or(0), Ordering::Release);
        if by.is_none() {
            kernel.unboxed[1 - own].store(0, Ordering::Release);
        }
    }
}

/// The types of a function by the letters of `small_values`, and where the caller puts the
/// arguments.
pub(super) struct Types {
    /// An argument of two words may have two places.
    arguments: Vec<(Type, [Place; 2])>,
    /// The indices of tensors and of lists of them, and how many of these lists are no objects.
    tensors: Vec<usize>,
    lists: usize,
    /// Another list of tensors is an object.
    has_lists: bool,
    results: Results,
    words_on_stack: usize,
    function: usize,
}

impl Type {
    /// The type of an argument of a kernel that takes numbers or symbols.
    const fn of(letter: u8, takes_symbols: bool) -> Option<Self> {
        Some(match letter {
            b't' => Self::Tensor,
            b'o' => Self::OptionalTensor,
            b'l' => Self::Tensors,
            b'p' => Self::OptionalTensors,
            b's' => Self::Number,
            b'q' => Self::OptionalNumber,
            b'n' => Self::Numbers,
            b'i' => Self::Int,
            b'j' => Self::OptionalInt,
            b'I' if takes_symbols => Self::Symbol,
            b'J' if takes_symbols => Self::OptionalSymbol,
            b'I' => Self::Int,
            b'J' => Self::OptionalInt,
            b'f' => Self::Float,
            b'g' => Self::OptionalFloat,
            b'b' => Self::Bool,
            b'c' => Self::OptionalBool,
            b'2'..=b'4' => Self::Bools((letter - b'0') as usize),
            b'd' => Self::OptionalDevice,
            b'G' => Self::OptionalGenerator,
            b'e' => Self::Kind,
            b'y' => Self::OptionalKind,
            b'z' => Self::Ints,
            b'w' => Self::OptionalInts,
            _ => return None,
        })
    }

    const fn has_tensors(self) -> bool {
        matches!(
            self,
            Self::Tensor | Self::OptionalTensor | Self::Tensors | Self::OptionalTensors
        )
    }

    /// The words of an argument that go to integer registers, to floating-point registers, and
    /// always to the stack.
    const fn words(self) -> [usize; 3] {
        match self {
            Self::Float => [0, 1, 0],
            Self::OptionalFloat => [1, 1, 0],
            Self::Tensors | Self::Numbers | Self::OptionalInt | Self::Ints => [2, 0, 0],
            Self::OptionalInts => [0, 0, 3],
            _ => [1, 0, 0],
        }
    }
}

impl Types {
    fn of(letters: &[u8], functions: Functions) -> Option<Self> {
        let (results, letters) = letters.split_last()?;
        let results = match results {
            b'v' => Results::None,
            b'r' => Results::Reference,
            b't' => Results::Tensors(1),
            b'T' => Results::Tensors(2),
            b'U' => Results::Tensors(3),
            b'V' => Results::Tensors(4),
            b'l' => Results::Vector,
            _ => return None,
        };
        let has_address = matches!(results, Results::Tensors(_) | Results::Vector);
        // The kernel's object and the dispatch keys come first.
        let (mut integers, mut doubles, mut words_on_stack) = (2 + usize::from(has_address), 0, 0);
        let mut arguments = Vec::with_capacity(letters.len());
        for letter in letters {
            let of = Type::of(*letter, functions.takes_symbols())?;
            let [of_integers, of_doubles, of_stack] = of.words();
            let fits = integers + of_integers <= INTEGERS && doubles + of_doubles <= DOUBLES;
            let places = if of_stack > 0 || !fits {
                let first = words_on_stack;
                words_on_stack += of_integers + of_doubles + of_stack;
                [Place::Stack(first), Place::Stack(first + 1)]
            } else {
                let first = integers;
                integers += of_integers;
                doubles += of_doubles;
                match of_doubles {
                    0 => [Place::Integer(first), Place::Integer(first + 1)],
                    _ => [Place::Double(doubles - 1), Place::Integer(first)],
                }
            };
            arguments.push((of, places));
        }
        let of_tensors = |index: &usize| arguments[*index].0.has_tensors();
        let is_list = |(of, _): &&(Type, _)| *of == Type::Tensors;
        Some(Self {
            tensors: (0..arguments.len()).filter(of_tensors).collect(),
            lists: arguments.iter().filter(is_list).count(),
            has_lists: arguments.iter().any(|(of, _)| *of == Type::OptionalTensors),
            arguments,
            results,
            words_on_stack,
            function: functions.only()?,
        })
    }
}

impl Call {
    fn word(&self, place: Place) -> u64 {
        match place {
            Place::Integer(index) => self.integers[index],
            Place::Double(index) => self.doubles[index],
            // SAFETY: the caller has put this argument there.
            Place::Stack(index) => unsafe { *self.stack.add(index) },
        }
    }

    /// The tensors of an argument, or the list of tensors if that is an object.
    fn objects<'a>(&self, (of, [first, second]): (Type, [Place; 2])) -> &'a [usize] {
        let address = self.word(first);
        match of {
            Type::Tensors => objects(address, self.word(second) as usize),
            // SAFETY: C++ passes the address of an optional tensor, which has a flag behind it.
            Type::OptionalTensor if unsafe { word(address as usize, 1) } as u8 != 1 => &[],
            _ => objects(address, 1),
        }
    }

    /// The tensors that the kernel has returned.
    fn results(&self, results: &Results) -> impl Iterator<Item = Value> {
        let (address, count) = match *results {
            Results::None => (0, 0),
            Results::Reference => (self.results[0], 1),
            Results::Tensors(count) => (self.results[0], count),
            Results::Vector => {
                let vector = ptr::with_exposed_provenance::<[u64; 2]>(self.results[0] as usize);
                // SAFETY: the kernel has written a vector there, which begins with its bounds.
                let [start, end] = unsafe { vector.read() };
                (start, (end - start) as usize / size_of::<usize>())
            }
        };
        let is_reversed = matches!(results, Results::Tensors(_));
        let objects = objects(address, count);
        (0..count).map(move |index| {
            let index = if is_reversed {
                count - 1 - index
            } else {
                index
            };
            Value::new(TENSOR, objects[index])
        })
    }
}

/// The objects of tensors at an address that C++ has passed.
fn objects<'a>(address: u64, count: usize) -> &'a [usize] {
    if count == 0 {
        return &[];
    }
    let start = ptr::with_exposed_provenance::<usize>(address as usize);
    // SAFETY: an `at::Tensor` is the address of its object, and this many are there in the call.
    unsafe { slice::from_raw_parts(start, count) }
}

/// The arguments of a call as values, without references to objects.
struct Arguments {
    /// Of these, the first ones are initialized.
    values: [MaybeUninit<Value>; MOST_ARGUMENTS],
    count: usize,
    /// Lists of tensors that C++ does not have as objects, and the elements of all.
    lists: Vec<List>,
    tensors: Vec<Value>,
    /// Other lists, and their elements.
    others: Vec<(Box<List>, Vec<Value>)>,
}

impl Arguments {
    const fn new() -> Self {
        Self {
            values: [const { MaybeUninit::uninit() }; MOST_ARGUMENTS],
            count: 0,
            lists: Vec::new(),
            tensors: Vec::new(),
            others: Vec::new(),
        }
    }

    /// Adds tensors and lists of tensors. Others are none until they are added.
    fn add_tensors(&mut self, known: &Known, types: &Types, call: &Call) {
        self.count = types.arguments.len();
        self.values[..self.count].fill(MaybeUninit::new(Value::new(NONE, 0)));
        if types.lists > 0 {
            self.reserve(types, call);
        }
        for &index in &types.tensors {
            let argument = types.arguments[index];
            let objects = call.objects(argument);
            let value = match (argument.0, objects) {
                (Type::OptionalTensors, [list]) => Value::new(known.list_tag, *list),
                (Type::Tensors, _) => {
                    let first = self.tensors.len();
                    let tensors = objects.iter().map(|object| Value::new(TENSOR, *object));
                    self.tensors.extend(tensors);
                    let list = known.lists[0].over(&mut self.tensors[first..]);
                    self.lists.push(list);
                    Value::new(known.list_tag, address(&self.lists[self.lists.len() - 1]))
                }
                (_, [object]) => Value::new(TENSOR, *object),
                _ => Value::new(NONE, 0),
            };
            self.values[index] = MaybeUninit::new(value);
        }
    }

    /// Reserves memory for lists of tensors, whose addresses stay.
    fn reserve(&mut self, types: &Types, call: &Call) {
        self.lists.reserve_exact(types.lists);
        let lists = types.tensors.iter().map(|index| &types.arguments[*index]);
        let lists = lists.filter(|(of, _)| *of == Type::Tensors);
        let count = lists.map(|(_, places)| call.word(places[1]) as usize).sum();
        self.tensors.reserve_exact(count);
    }

    /// Adds all else.
    fn add_others(&mut self, known: &Known, types: &Types, call: &Call) {
        for (index, (of, places)) in types.arguments.iter().enumerate() {
            let first = call.word(places[0]) as usize;
            let second = || call.word(places[1]) as usize;
            let is_bool = |word: usize| Value::new(known.bool_tag, usize::from(word as u8 == 1));
            let optional = |flag: usize, value: Value| match flag as u8 {
                1 => value,
                _ => Value::new(NONE, 0),
            };
            let value = match of {
                Type::Tensor | Type::OptionalTensor | Type::Tensors | Type::OptionalTensors => {
                    continue;
                }
                Type::Number => number(known, first),
                Type::OptionalNumber => {
                    let flag = ptr::with_exposed_provenance::<u8>(first + NUMBER);
                    // SAFETY: the address of an optional number, which has a flag behind it.
                    let flag = unsafe { flag.read() };
                    optional(flag.into(), number(known, first))
                }
                Type::Numbers => {
                    let numbers = (0..second()).map(|index| number(known, first + index * NUMBER));
                    let numbers = numbers.collect();
                    self.list(known, 2, numbers)
                }
                Type::Int => Value::new(INT, first),
                Type::OptionalInt => optional(second(), Value::new(INT, first)),
                // SAFETY: the address of a symbol, which is a word.
                Type::Symbol => Value::new(INT, unsafe { word(first, 0) }),
                // SAFETY: the address of an optional symbol, which has a flag behind it.
                Type::OptionalSymbol => unsafe {
                    optional(word(first, 1), Value::new(INT, word(first, 0)))
                },
                Type::Float => Value::new(DOUBLE, first),
                Type::OptionalFloat => optional(second(), Value::new(DOUBLE, first)),
                Type::Bool => is_bool(first),
                Type::OptionalBool => optional(first >> 8, is_bool(first)),
                Type::Bools(count) => {
                    let flags = (0..*count).map(|index| is_bool(first >> (8 * index)));
                    let flags = flags.collect();
                    self.list(known, 3, flags)
                }
                Type::OptionalDevice => {
                    let device = Value::new(known.device_tag, first & 0xffff);
                    optional(first >> 16, device)
                }
                // SAFETY: the address of an optional generator, which has a flag behind it.
                Type::OptionalGenerator => unsafe {
                    optional(word(first, 1), Value::new(OTHER.tag, word(first, 0)))
                },
                Type::Kind => Value::new(INT, first & 0xff),
                Type::OptionalKind => optional(first >> 8, Value::new(INT, first & 0xff)),
                Type::Ints => self.ints(known, first, second()),
                Type::OptionalInts => {
                    let Place::Stack(place) = places[0] else {
                        continue;
                    };
                    match call.word(Place::Stack(place + 2)) as u8 {
                        1 => self.ints(known, first, second()),
                        _ => Value::new(NONE, 0),
                    }
                }
            };
            self.values[index] = MaybeUninit::new(value);
        }
    }

    fn ints(&mut self, known: &Known, address: usize, count: usize) -> Value {
        let start = ptr::with_exposed_provenance::<usize>(address);
        // SAFETY: C++ passes the address of this many integers.
        let int = |index| unsafe { Value::new(INT, start.add(index).read()) };
        self.list(known, 1, (0..count).map(int).collect())
    }

    /// A list of the type of one of [`Known::lists`].
    fn list(&mut self, known: &Known, like: usize, mut values: Vec<Value>) -> Value {
        let list = Box::new(known.lists[like].over(&mut values));
        let address = address(&list);
        self.others.push((list, values));
        Value::new(known.list_tag, address)
    }

    fn all(&self) -> &[Value] {
        // SAFETY: this many values are initialized.
        unsafe { self.values[..self.count].assume_init_ref() }
    }
}

fn address(list: &List) -> usize {
    ptr::from_ref(list).expose_provenance()
}

/// A word of an object of C++.
///
/// # Safety
/// The object has this word.
unsafe fn word(address: usize, index: usize) -> usize {
    // SAFETY: as the caller promises.
    unsafe {
        ptr::with_exposed_provenance::<usize>(address)
            .add(index)
            .read()
    }
}

/// The number at an address that C++ has passed.
fn number(known: &Known, address: usize) -> Value {
    // SAFETY: a `c10::Scalar` is there.
    let (tag, payload) = unsafe {
        let start = ptr::with_exposed_provenance::<u32>(address);
        (
            start.read(),
            start.byte_add(NUMBER / 2).cast::<usize>().read(),
        )
    };
    match tag {
        0 => Value::new(DOUBLE, payload),
        1 => Value::new(INT, payload),
        4 => Value::new(known.bool_tag, usize::from(payload as u8 == 1)),
        _ => OTHER,
    }
}

/// Makes a function that takes unboxed arguments in place of a kernel's. Returns its address.
/// `None` if a type is not known, or there are too many operations.
pub(super) fn entry(
    operation: Option<&'static Operation>,
    functions: Functions,
    letters: &[u8],
) -> Option<usize> {
    let types = Types::of(letters, functions).filter(|types| {
        let count = types.arguments.len();
        let fits = operation.is_none_or(|operation| operation.arguments == count);
        fits && count <= MOST_ARGUMENTS
    })?;
    let index = USED.fetch_add(1, Ordering::Relaxed);
    let slot = OPERATIONS.get(index)?;
    slot.store(
        Box::into_raw(Box::new((operation, types))),
        Ordering::Release,
    );
    Some(harness_small_entries as *const () as usize + index * ENTRY_SIZE)
}

/// Calls the GPU's kernel, and what the values need before and after. Returns `false` if only the
/// kernel is to be called.
unsafe extern "C-unwind" fn enter(index: u32, call: &mut Call) -> bool {
    let slot = OPERATIONS[index as usize].load(Ordering::Acquire);
    // SAFETY: `entry` has stored it before it returned the function, and nothing frees it.
    let (operation, types) = unsafe { &*slot };
    let known = KNOWN
        .get()
        .expect("the layouts are known before an entry exists");
    call.function = types.function;
    let Some(operation) = operation else {
        watch(known, types, call);
        return true;
    };
    // Calls for large tensors are the most, so they get no values for their arguments.
    let tensors = types.tensors.iter();
    let tensors = tensors.map(|index| (*index, call.objects(types.arguments[*index])));
    if !types.has_lists && operation.only_forgets(known, tensors) {
        let Some(kept) = Kept::if_any() else {
            return false;
        };
        // SAFETY: the state is that of the call, with this many words on the stack.
        unsafe { harness_small_call(call, types.words_on_stack) };
        Around::Forget(Vec::new(), kept).after(known, call.results(&types.results));
        return true;
    }
    enter_with_values(known, operation, types, call)
}

/// As [`enter`], for any call of an operation.
#[inline(never)]
fn enter_with_values(
    known: &Known,
    operation: &'static Operation,
    types: &Types,
    call: &mut Call,
) -> bool {
    let mut arguments = Arguments::new();
    arguments.add_tensors(known, types, call);
    let around = match operation.plan(known, arguments.all()) {
        Plan::Leave => return false,
        Plan::Forget(changed) => Around::Forget(changed, Kept::new()),
        Plan::Compute => {
            arguments.add_others(known, types, call);
            operation.before(known, arguments.all(), true)
        }
    };
    // SAFETY: the state is that of the call, with this many words on the stack.
    unsafe { harness_small_call(call, types.words_on_stack) };
    around.after(known, call.results(&types.results));
    true
}

/// Calls a kernel of the CPU, and describes the call.
fn watch(known: &Known, types: &Types, call: &mut Call) {
    let mut arguments = Arguments::new();
    arguments.add_tensors(known, types, call);
    arguments.add_others(known, types, call);
    let mut text = String::new();
    describe(known, arguments.all(), &mut text);
    // SAFETY: the state is that of the call, with this many words on the stack.
    unsafe { harness_small_call(call, types.words_on_stack) };
    text.push_str(" >");
    describe(
        known,
        &call.results(&types.results).collect::<Vec<_>>(),
        &mut text,
    );
    WATCHED.set(text);
}

thread_local! {
    /// What the last watched call of this thread has passed and returned.
    static WATCHED: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Describes values: a tensor by its number of elements.
fn describe(known: &Known, values: &[Value], text: &mut String) {
    for value in values {
        text.push(' ');
        let _ = match value.tag {
            NONE => write!(text, "none"),
            TENSOR => write!(text, "{}", known.elements(value)),
            DOUBLE => write!(text, "{:?}", f64::from_bits(value.payload as u64)),
            INT => write!(text, "{}", value.payload.cast_signed()),
            tag if tag == known.bool_tag => write!(text, "{}", value.payload == 1),
            _ => match known.list(value) {
                Some(list) => {
                    text.push('[');
                    describe(known, list.elements.all(), text);
                    write!(text, " ]")
                }
                None => write!(text, "?"),
            },
        };
    }
}

/// Describes the next calls of an operation's kernel of the CPU. Returns the function that it
/// replaces, or 0.
///
/// # Safety
/// The operation exists, and the types are letters.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_small_watch(
    names: &[*const c_char; 2],
    types: *const c_char,
) -> usize {
    // SAFETY: as the caller promises.
    let [name, overload, types] =
        [names[0], names[1], types].map(|text| unsafe { CStr::from_ptr(text) });
    let Some(known) = KNOWN.get() else { return 0 };
    let handle = known.torch.find(name, overload);
    let kernel = handle.kernel(known.on_cpu);
    let functions = Functions::of(kernel);
    let Some(entry) = entry(None, functions, types.to_bytes()) else {
        return 0;
    };
    functions.replace(kernel, Some(entry));
    functions.only().unwrap_or(0)
}

/// Ends what [`harness_small_watch`] began. Returns whether the description of the last call is the
/// expected one.
///
/// # Safety
/// The operation exists.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_small_watched(
    names: &[*const c_char; 2],
    function: usize,
    expected: *const c_char,
) -> bool {
    // SAFETY: as the caller promises.
    let [name, overload, expected] =
        [names[0], names[1], expected].map(|text| unsafe { CStr::from_ptr(text) });
    let Some(known) = KNOWN.get() else {
        return false;
    };
    let handle = known.torch.find(name, overload);
    let kernel = handle.kernel(known.on_cpu);
    Functions::of(kernel).replace(kernel, Some(function));
    WATCHED.take().as_bytes() == expected.to_bytes()
}

unsafe extern "C-unwind" {
    fn harness_small_entries();
    /// Calls the function of a call with its registers and this many words of its stack.
    fn harness_small_call(call: &mut Call, words: usize);
}

global_asm!(
    ".p2align 4",
    ".globl harness_small_entries",
    ".hidden harness_small_entries",
    "harness_small_entries:",
    ".cfi_startproc",
    ".set harness_small_index, 0",
    ".rept {entries}",
    ".p2align 4",
    "mov r11d, offset harness_small_index",
    ".set harness_small_index, harness_small_index + 1",
    "jmp 2f",
    ".endr",
    ".p2align 4",
    "2:",
    "push rbp",
    ".cfi_def_cfa_offset 16",
    ".cfi_offset rbp, -16",
    "mov rbp, rsp",
    ".cfi_def_cfa_register rbp",
    "sub rsp, {size}",
    "mov [rsp], rdi",
    "mov [rsp + 8], rsi",
    "mov [rsp + 16], rdx",
    "mov [rsp + 24], rcx",
    "mov [rsp + 32], r8",
    "mov [rsp + 40], r9",
    "movsd [rsp + 48], xmm0",
    "movsd [rsp + 56], xmm1",
    "movsd [rsp + 64], xmm2",
    "movsd [rsp + 72], xmm3",
    "movsd [rsp + 80], xmm4",
    "movsd [rsp + 88], xmm5",
    "movsd [rsp + 96], xmm6",
    "movsd [rsp + 104], xmm7",
    "lea rax, [rbp + 16]",
    "mov [rsp + {stack}], rax",
    "mov edi, r11d",
    "mov rsi, rsp",
    "call {enter}",
    "test al, al",
    "jz 3f",
    "mov rax, [rsp + {results}]",
    "mov rdx, [rsp + {results} + 8]",
    ".cfi_remember_state",
    "leave",
    ".cfi_def_cfa rsp, 8",
    "ret",
    ".cfi_restore_state",
    "3:",
    "mov rdi, [rsp]",
    "mov rsi, [rsp + 8]",
    "mov rdx, [rsp + 16]",
    "mov rcx, [rsp + 24]",
    "mov r8, [rsp + 32]",
    "mov r9, [rsp + 40]",
    "movsd xmm0, [rsp + 48]",
    "movsd xmm1, [rsp + 56]",
    "movsd xmm2, [rsp + 64]",
    "movsd xmm3, [rsp + 72]",
    "movsd xmm4, [rsp + 80]",
    "movsd xmm5, [rsp + 88]",
    "movsd xmm6, [rsp + 96]",
    "movsd xmm7, [rsp + 104]",
    "mov r11, [rsp + {function}]",
    "leave",
    ".cfi_def_cfa rsp, 8",
    "jmp r11",
    ".cfi_endproc",
    ".p2align 4",
    ".globl harness_small_call",
    ".hidden harness_small_call",
    "harness_small_call:",
    ".cfi_startproc",
    "push rbp",
    ".cfi_def_cfa_offset 16",
    ".cfi_offset rbp, -16",
    "mov rbp, rsp",
    ".cfi_def_cfa_register rbp",
    "push rbx",
    ".cfi_offset rbx, -24",
    "sub rsp, 8",
    "mov rbx, rdi",
    "test rsi, rsi",
    "jz 2f",
    "lea rax, [rsi * 8 + 15]",
    "and rax, -16",
    "sub rsp, rax",
    "mov rcx, rsi",
    "mov rsi, [rbx + {stack}]",
    "mov rdi, rsp",
    "rep movsq",
    "2:",
    "mov rdi, [rbx]",
    "mov rsi, [rbx + 8]",
    "mov rdx, [rbx + 16]",
    "mov rcx, [rbx + 24]",
    "mov r8, [rbx + 32]",
    "mov r9, [rbx + 40]",
    "movsd xmm0, [rbx + 48]",
    "movsd xmm1, [rbx + 56]",
    "movsd xmm2, [rbx + 64]",
    "movsd xmm3, [rbx + 72]",
    "movsd xmm4, [rbx + 80]",
    "movsd xmm5, [rbx + 88]",
    "movsd xmm6, [rbx + 96]",
    "movsd xmm7, [rbx + 104]",
    "call [rbx + {function}]",
    "mov [rbx + {results}], rax",
    "mov [rbx + {results} + 8], rdx",
    "mov rbx, [rbp - 8]",
    "leave",
    ".cfi_def_cfa rsp, 8",
    "ret",
    ".cfi_endproc",
    entries = const MOST_ENTRIES,
    size = const size_of::<Call>(),
    stack = const offset_of!(Call, stack),
    function = const offset_of!(Call, function),
    results = const offset_of!(Call, results),
    enter = sym enter,
);

#[cfg(test)]
mod tests;
