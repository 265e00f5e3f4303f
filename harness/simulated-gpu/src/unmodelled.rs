//! The answer to every function that has no code of its own.
//!
//! The libraries that stand in for NVIDIA's have a stub for each such function. It loads the address of a [`Stub`] into `r11` and jumps to
//! `harness_gpu_unmodelled`. For a function whose signature is known ([`TABLE`], from the headers of CUDA 13.0) its outputs are written: zero
//! through pointers to numbers, a zeroed object where one is made. An output left alone would be taken for a size by the caller. A function that is
//! not in the table is noted by name. All answer zero, which is success.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{CStr, c_char};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::world;

/// The functions: name, then what is done with its arguments. An argument is named by its place among those that are passed as integers, from 0,
/// and a letter: `w` four bytes and `q` eight bytes of zeros are written to where it points, `n` it points to where a new object goes, `d` it
/// is such an object and goes.
const TABLE: &str = include_str!("unmodelled.tsv");

/// What the stub of a function points to. Written by whoever made the library that the stub is in.
#[repr(C, align(16))]
struct Stub {
    name: *const c_char,
    /// Null before the first call.
    function: AtomicPtr<Function>,
}

/// A function by what it does with its arguments.
struct Function {
    name: &'static str,
    effects: Vec<(usize, Effect)>,
}

#[derive(Clone, Copy)]
enum Effect {
    Zero4,
    Zero8,
    New,
    Delete,
}

/// The size of objects that are made: no structure that a caller looks into.
const OBJECT: Layout = match Layout::from_size_align(512, 16) {
    Ok(layout) => layout,
    Err(_) => panic!("512 is a multiple of 16"),
};

/// A new zeroed object for a handle that callers only hand back.
pub(crate) fn new_object() -> *mut u8 {
    // SAFETY: the layout is not empty.
    unsafe { alloc_zeroed(OBJECT) }
}

/// Takes an object back.
///
/// # Safety
/// It is null, or one of [`new_object`] that was not taken back yet.
pub(crate) unsafe fn delete_object(object: *mut u8) {
    if !object.is_null() {
        // SAFETY: as the caller promises; all objects have the one layout.
        unsafe { dealloc(object, OBJECT) };
    }
}

/// Where every stub jumps to, with its [`Stub`] in `r11` and the function's arguments where the caller put them.
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
        "leave",
        "ret",
        answer = sym answer,
    );
}

/// Does what is known of a function with its arguments: the first six passed as integers, and those on the stack.
unsafe extern "C" fn answer(stub: *const Stub, registers: *const u64, stack: *const u64) -> u64 {
    // SAFETY: a stub hands over its own descriptor, which lives as long as the library it is in.
    let stub = unsafe { &*stub };
    let mut function = stub.function.load(Ordering::Acquire);
    if function.is_null() {
        // SAFETY: the name of a stub is a string in the library it is in.
        function = ptr::from_ref(known(unsafe { CStr::from_ptr(stub.name) })).cast_mut();
        stub.function.store(function, Ordering::Release);
    }
    // SAFETY: it was a reference that never dies.
    for &(place, effect) in unsafe { &(*function).effects } {
        // SAFETY: the signature has that many arguments passed as integers, six of them in registers.
        let argument = unsafe { if place < 6 { *registers.add(place) } else { *stack.add(place - 6) } };
        if argument == 0 || world::is_device_memory(argument) {
            continue;
        }
        let pointer = ptr::with_exposed_provenance_mut::<u8>(argument as usize);
        // SAFETY: by the signature, the argument points to a number, or to a pointer, of that size that the function writes, or is an object that
        // `Effect::New` made; what lies on a device was left out.
        unsafe {
            match effect {
                Effect::Zero4 => pointer.cast::<u32>().write_unaligned(0),
                Effect::Zero8 => pointer.cast::<u64>().write_unaligned(0),
                Effect::New => pointer.cast::<*mut u8>().write(new_object()),
                Effect::Delete => delete_object(pointer),
            }
        }
    }
    0
}

/// The function of that name. One that is not in the table has no effects, and is noted.
fn known(name: &CStr) -> &'static Function {
    static FUNCTIONS: OnceLock<Vec<Function>> = OnceLock::new();
    let functions = FUNCTIONS.get_or_init(|| TABLE.lines().filter(|line| !line.starts_with('#')).map(Function::of_row).collect());
    let found = functions.binary_search_by(|function| function.name.as_bytes().cmp(name.to_bytes()));
    found.map_or_else(
        |_| {
            world::counters().note_unmodelled(name.to_bytes());
            &*Box::leak(Box::new(Function { name: "", effects: Vec::new() }))
        },
        |index| &functions[index],
    )
}

impl Function {
    fn of_row(row: &'static str) -> Self {
        let mut fields = row.split('\t');
        let name = fields.next().unwrap_or_default();
        let effects = fields.next().unwrap_or_default().split(' ').filter_map(|text| {
            let (place, letter) = text.split_at_checked(text.len().checked_sub(1)?)?;
            let effect = match letter {
                "w" => Effect::Zero4,
                "q" => Effect::Zero8,
                "n" => Effect::New,
                "d" => Effect::Delete,
                _ => return None,
            };
            Some((place.parse().ok()?, effect))
        });
        Self { name, effects: effects.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_each_of_its_rows_is_read_whole() {
        let rows: Vec<&str> = TABLE.lines().filter(|line| !line.starts_with('#')).collect();
        assert!(rows.is_sorted() && rows.len() > 400, "{}", rows.len());
        for row in rows {
            let effects = row.split('\t').nth(1).unwrap_or_default();
            assert_eq!(Function::of_row(row).effects.len(), effects.split_terminator(' ').count(), "{row}");
        }
    }
}
