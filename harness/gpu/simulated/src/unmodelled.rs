//! Answers all functions without code in this crate.
//!
//! The stub libraries have a stub for each such function. It loads the address of a [`Stub`] into
//! `r11` and jumps to `harness_gpu_unmodelled`. [`TABLE`] describes the outputs of known functions,
//! from the headers of CUDA 13.0. They return success. Numbers become zero and new objects are
//! zeroed, because a caller might take an unwritten output for a size. Other functions write
//! nothing, and the report lists them. Those of the driver and the runtime return "not supported".

use std::ffi::{CStr, c_char};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::{ptr, slice};

use crate::objects::{delete_object, new_object};
use crate::per_thread::{PerThread, base};
use crate::{code::Code, copied, libraries, solver, stack::words_on_stack, world};

/// The functions: the name, then the effects on its arguments. An effect is the position among the
/// integer arguments, from 0, and a letter. `w` writes four bytes of zeros and `q` eight through
/// the pointer; `s` and `t` write the size of a workspace of cuSOLVER in four and eight bytes; `n`
/// writes the handle of a new object; `d` destroys the object. `h` is the type of a product's
/// elements, and `l` points to it. `k` is the stream of the work, without which the first argument
/// is a handle that has one.
const TABLE: &str = include_str!("unmodelled.tsv");

#[repr(C, align(16))]
struct Stub {
    name: *const c_char,
    /// Null before the first call.
    function: AtomicPtr<Function>,
}

struct Function {
    name: &'static str,
    effects: Vec<(usize, Effect)>,
    result: u64,
    /// Its name says that it changes no memory of a device.
    only_describes: bool,
    /// The library for which it submits work.
    submits_for: Option<&'static str>,
    /// The function that it is, with a default stream per thread.
    per_thread: Option<PerThread>,
}

/// Beginnings of the names of functions that submit work.
const LIBRARIES: [&str; 6] = ["cublas", "cudnn", "cufft", "curand", "cusolver", "cusparse"];

fn library(name: &str, only_describes: bool) -> Option<&'static str> {
    let mut libraries = LIBRARIES.into_iter().filter(|_| !only_describes);
    libraries.find(|library| name.starts_with(library))
}

/// Parts of the names of functions that create, change or destroy descriptions of later work, or
/// return the size of what it needs.
const DESCRIBES: [&str; 6] = [
    "Create",
    "Destroy",
    "Descriptor",
    "Attribute",
    "Mode",
    "Size",
];
/// Functions with such names that write device memory: a sequence, and states of random numbers.
const WRITES: [&str; 2] = [
    "cudnnSetDropoutDescriptor",
    "cusparseCreateIdentityPermutation",
];

#[derive(Clone, Copy)]
enum Effect {
    Zero4,
    Zero8,
    Workspace4,
    Workspace8,
    New,
    Delete,
    Elements,
    ElementsAt,
    Stream,
}

/// What a stub does: it returns, or it jumps to a function unless that is 0.
#[repr(C)]
struct Answer {
    result: u64,
    function: usize,
}

/// The target of every stub, with its [`Stub`] in `r11` and the arguments of the function in place.
#[unsafe(no_mangle)]
#[unsafe(naked)]
extern "C" fn harness_gpu_unmodelled() {
    std::arch::naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "sub rsp, 48",
        "mov [rsp], rdi",
        "mov [rsp + 8], rsi",
        "mov [rsp + 16], rdx",
        "mov [rsp + 24], rcx",
        "mov [rsp + 32], r8",
        "mov [rsp + 40], r9",
        "mov rdi, r11",
        "mov rsi, rsp",
        "lea rdx, [rbp + 16]",
        "call {answer}",
        "test rdx, rdx",
        "jne 2f",
        "leave",
        "ret",
        "2:",
        "mov r11, rdx",
        "mov rdi, [rsp]",
        "mov rsi, [rsp + 8]",
        "mov rdx, [rsp + 16]",
        "mov rcx, [rsp + 24]",
        "mov r8, [rsp + 32]",
        "mov r9, [rsp + 40]",
        "leave",
        "jmp r11",
        answer = sym answer,
    );
}

/// Applies the effects of a function to its arguments: the first six integer arguments, and those
/// on the stack.
unsafe extern "C" fn answer(stub: *const Stub, registers: *mut u64, stack: *mut u64) -> Answer {
    // SAFETY: a stub passes its own data, which lives as long as its library.
    let stub = unsafe { &*stub };
    let mut function = stub.function.load(Ordering::Acquire);
    if function.is_null() {
        // SAFETY: the name is a string in the library of the stub.
        function = ptr::from_ref(known(unsafe { CStr::from_ptr(stub.name) })).cast_mut();
        stub.function.store(function, Ordering::Release);
    }
    // SAFETY: the pointer came from a static reference.
    let function = unsafe { &*function };
    if let Some(per_thread) = function.per_thread {
        return Answer {
            result: 0,
            // SAFETY: these are the arguments of a call of the function.
            function: unsafe { per_thread.prepare(registers, stack) },
        };
    }
    if !function.only_describes {
        forget_outputs(registers, stack);
    }
    // SAFETY: the signature has this many integer arguments, six of them in registers.
    let argument = |place: usize| unsafe {
        if place < 6 {
            *registers.add(place)
        } else {
            *stack.add(place - 6)
        }
    };
    if let Some(library) = function.submits_for {
        world::machine().submit_for_library(function.stream(library, argument));
    }
    let mut result = function.result;
    for &(place, effect) in &function.effects {
        let address = argument(place);
        if address == 0 || world::is_device_memory(address) {
            continue;
        }
        let pointer = ptr::with_exposed_provenance_mut::<u8>(address as usize);
        // SAFETY: by the signature, the argument points to an output of this size, or is an object
        // from `Effect::New`. Device addresses are skipped.
        unsafe {
            match effect {
                Effect::Zero4 => pointer.cast::<u32>().write_unaligned(0),
                Effect::Zero8 => pointer.cast::<u64>().write_unaligned(0),
                Effect::Workspace4 => {
                    let elements = solver::workspace(function.name, argument);
                    pointer
                        .cast::<i32>()
                        .write_unaligned(i32::try_from(elements).unwrap_or(i32::MAX));
                }
                Effect::Workspace8 => pointer
                    .cast::<u64>()
                    .write_unaligned(solver::workspace(function.name, argument)),
                Effect::New => pointer.cast::<*mut u8>().write(new_object()),
                Effect::Delete => delete_object(pointer),
                Effect::Elements => result = product(address as i32),
                Effect::ElementsAt => result = product(pointer.cast::<i32>().read()),
                Effect::Stream => {}
            }
        }
    }
    Answer {
        result,
        function: 0,
    }
}

/// The status of a product, by the type of its elements: 2 and 14 are float16 and bfloat16.
fn product(elements: i32) -> u64 {
    if matches!(elements, 2 | 14) {
        libraries::half_product() as u64
    } else {
        0
    }
}

/// The arguments on the stack that can point to an output: cublasLtMatmul has ten.
const ON_STACK: usize = 16;

/// Forgets the copies that arguments point into, for example the output of a product.
fn forget_outputs(registers: *const u64, stack: *const u64) {
    if !copied::any() {
        return;
    }
    let on_stack = words_on_stack(stack.addr()).min(ON_STACK);
    // SAFETY: there are six registers, and these words are on the stack.
    let words = unsafe {
        [
            slice::from_raw_parts(registers, 6),
            slice::from_raw_parts(stack, on_stack),
        ]
    };
    for address in words.into_iter().flatten().copied() {
        world::forget_output(address);
    }
}

fn result_of_unknown(name: &[u8]) -> u64 {
    let is_cuda = name.starts_with(b"cuda") || matches!(name, [b'c', b'u', b'A'..=b'Z', ..]);
    if is_cuda {
        Code::NotSupported as u64
    } else {
        0
    }
}

/// The function of this name. The names of functions outside of the table are listed.
fn known(name: &CStr) -> &'static Function {
    static FUNCTIONS: OnceLock<Vec<Function>> = OnceLock::new();
    let functions = FUNCTIONS.get_or_init(|| {
        TABLE
            .lines()
            .filter(|line| !line.starts_with('#'))
            .map(Function::of_row)
            .collect()
    });
    let text = name.to_str().unwrap_or_default();
    let found = functions.binary_search_by(|function| function.name.cmp(base(text)));
    found.map_or_else(
        |_| {
            let per_thread = PerThread::named(text);
            if per_thread.is_some() {
                return &*Box::leak(Box::new(Function {
                    per_thread,
                    ..Function::unknown(0)
                }));
            }
            let result = result_of_unknown(name.to_bytes());
            let counters = &world::machine().counters;
            counters.note_unmodelled(name.to_bytes());
            if result != 0 {
                counters.note_refusal(name.to_bytes(), result);
            }
            &*Box::leak(Box::new(Function {
                submits_for: library(text, false),
                ..Function::unknown(result)
            }))
        },
        |index| &functions[index],
    )
}

impl Function {
    const fn unknown(result: u64) -> Self {
        Self {
            name: "",
            effects: Vec::new(),
            result,
            only_describes: false,
            submits_for: None,
            per_thread: None,
        }
    }

    fn of_row(row: &'static str) -> Self {
        let mut fields = row.split('\t');
        let name = fields.next().unwrap_or_default();
        let effects = fields
            .next()
            .unwrap_or_default()
            .split(' ')
            .filter_map(|text| {
                let (place, letter) = text.split_at_checked(text.len().checked_sub(1)?)?;
                let effect = match letter {
                    "w" => Effect::Zero4,
                    "q" => Effect::Zero8,
                    "s" => Effect::Workspace4,
                    "t" => Effect::Workspace8,
                    "n" => Effect::New,
                    "d" => Effect::Delete,
                    "h" => Effect::Elements,
                    "l" => Effect::ElementsAt,
                    "k" => Effect::Stream,
                    _ => return None,
                };
                Some((place.parse().ok()?, effect))
            });
        let only_describes =
            DESCRIBES.iter().any(|part| name.contains(part)) && !WRITES.contains(&name);
        Self {
            name,
            effects: effects.collect(),
            result: 0,
            only_describes,
            submits_for: library(name, only_describes),
            per_thread: None,
        }
    }

    /// The stream of its work.
    fn stream(&self, library: &str, argument: impl Fn(usize) -> u64) -> usize {
        let given = self
            .effects
            .iter()
            .find_map(|(place, effect)| match effect {
                Effect::Stream => Some(argument(*place) as usize),
                _ => None,
            });
        given.unwrap_or_else(|| match library {
            // The number of a plan has four bytes.
            "cufft" => libraries::stream_of(argument(0) as u32 as usize),
            _ => libraries::stream_of(argument(0) as usize),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_every_effect_is_parsed() {
        let rows: Vec<&str> = TABLE
            .lines()
            .filter(|line| !line.starts_with('#'))
            .collect();
        assert!(rows.is_sorted() && rows.len() > 400, "{}", rows.len());
        for row in rows {
            let effects = row.split('\t').nth(1).unwrap_or_default();
            assert_eq!(
                Function::of_row(row).effects.len(),
                effects.split_terminator(' ').count(),
                "{row}"
            );
        }
    }

    #[test]
    fn a_function_that_writes_device_memory_does_not_only_describe() {
        for name in WRITES {
            let row = TABLE
                .lines()
                .find(|row| row.split('\t').next() == Some(name));
            assert!(!Function::of_row(row.expect(name)).only_describes, "{name}");
        }
    }

    #[test]
    fn a_function_that_destroys_an_object_frees_it() {
        let created = TABLE
            .lines()
            .filter_map(|row| row.strip_suffix("\t0n"))
            .map(|name| {
                name.replace("Create", "Destroy")
                    .replace("_create", "_destroy")
            });
        let kept: Vec<String> = created
            .filter(|name| TABLE.lines().any(|row| row == name))
            .collect();
        assert!(kept.is_empty(), "{kept:?}");
    }
}
