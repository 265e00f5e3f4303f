//! Executes a timed program in this process, without an order per operation.

use std::ffi::c_void;
use std::time::Instant;

use harness_allocator::allocator::library::wire::{Call, Operation, Program, Reply, Timed};

use crate::connection::{ask, connection, nanos_since, waited};
use crate::handles::Stream;
use crate::library::Functions;

/// Maximum number of reported failed requests.
const MOST_REFUSED: usize = 4096;

/// The contents of a slot.
#[derive(Clone, Copy)]
struct Live {
    address: *mut c_void,
    size: isize,
    stream: Stream,
}

struct Runner<'a> {
    functions: &'a Functions,
    slots: Vec<Option<Live>>,
    refused: Vec<u64>,
}

/// Runs a program and frees its remaining allocations.
///
/// # Safety
/// The library's functions have the types of the library interface.
pub(crate) unsafe fn run(functions: &Functions, program: &Program) -> Timed {
    let slots = program.before.iter().chain(&program.timed).filter_map(Operation::slot).max().map_or(0, |slot| slot as usize + 1);
    let mut runner = Runner { functions, slots: vec![None; slots], refused: Vec::new() };
    // SAFETY: guaranteed by the caller.
    unsafe { runner.run(&program.before, 0) };
    say(Reply::Timing(true));
    let (began, waited_before) = (Instant::now(), waited());
    for _ in 0..program.times {
        // SAFETY: as above.
        unsafe { runner.run(&program.timed, program.before.len() as u64) };
    }
    let nanos = nanos_since(began).saturating_sub(waited() - waited_before);
    say(Reply::Timing(false));
    for slot in 0..runner.slots.len() {
        // SAFETY: as above.
        unsafe { runner.free(slot) };
    }
    Timed { nanos, refused: runner.refused }
}

fn say(reply: Reply) {
    connection().iter_mut().for_each(|connection| connection.say(&reply));
}

impl Runner<'_> {
    /// # Safety
    /// As for [`run`].
    unsafe fn run(&mut self, operations: &[Operation], first: u64) {
        let Functions { allocate, record_stream, empty_cache, .. } = *self.functions;
        for (operation, number) in operations.iter().zip(first..) {
            // SAFETY: guaranteed by the caller. The program names the number of slots, and live addresses belong to the library.
            unsafe {
                match *operation {
                    Operation::Allocate { slot, size, stream } => {
                        let (size, stream) = (isize::try_from(size).unwrap_or(isize::MAX), Stream::new(stream));
                        let address = allocate(size, 0, stream);
                        self.slots[slot as usize] = (!address.is_null()).then_some(Live { address, size, stream });
                        if address.is_null() && self.refused.len() < MOST_REFUSED {
                            self.refused.push(number);
                        }
                    }
                    Operation::Free { slot } => self.free(slot as usize),
                    Operation::RecordStream { slot, stream } => {
                        if let (Some(live), Some(record_stream)) = (self.slots[slot as usize], record_stream) {
                            record_stream(live.address, Stream::new(stream));
                        }
                    }
                    Operation::EmptyCache => empty_cache.iter().for_each(|function| function()),
                    // The harness judges the results.
                    Operation::Synchronize => drop(ask(Call::Synchronize)),
                    Operation::SynchronizeStream(stream) => drop(ask(Call::SynchronizeStream(stream))),
                }
            }
        }
    }

    /// # Safety
    /// As for [`run`].
    unsafe fn free(&mut self, slot: usize) {
        if let Some(Live { address, size, stream }) = self.slots[slot].take() {
            // SAFETY: the library returned the address, and it is freed once.
            unsafe { (self.functions.free)(address, size, 0, stream) };
        }
    }
}
