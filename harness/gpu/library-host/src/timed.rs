//! Executes a timed program in this process, without an order per operation.

use std::time::Instant;

use harness_allocator::allocator::library::wire::{
    LibraryCall, LibraryOperation, LibraryProgram, Reply, Timed,
};

use crate::connection::{ask, connection, nanos_since, waited};
use crate::library::Functions;

/// Maximum number of reported failed requests.
const MOST_REFUSED: usize = 4096;

#[derive(Clone, Copy)]
struct Live {
    address: u64,
    size: u64,
    stream: u32,
}

struct Runner<'a> {
    functions: &'a Functions,
    slots: Vec<Option<Live>>,
    refused: Vec<u64>,
}

/// Runs a program and frees its remaining allocations.
pub(crate) fn run(functions: &Functions, program: &LibraryProgram) -> Timed {
    let slots = program
        .before
        .iter()
        .chain(&program.timed)
        .filter_map(LibraryOperation::slot)
        .max()
        .map_or(0, |slot| slot as usize + 1);
    let mut runner = Runner {
        functions,
        slots: vec![None; slots],
        refused: Vec::new(),
    };
    runner.run(&program.before, 0);
    say(Reply::Timing(true));
    let (began, waited_before) = (Instant::now(), waited());
    for _ in 0..program.times {
        runner.run(&program.timed, program.before.len() as u64);
    }
    let nanos = nanos_since(began).saturating_sub(waited() - waited_before);
    say(Reply::Timing(false));
    (0..slots).for_each(|slot| runner.free(slot));
    Timed {
        nanos,
        refused: runner.refused,
    }
}

fn say(reply: Reply) {
    connection()
        .iter_mut()
        .for_each(|connection| connection.say(&reply));
}

impl Runner<'_> {
    fn run(&mut self, operations: &[LibraryOperation], first: u64) {
        for (operation, number) in operations.iter().zip(first..) {
            match *operation {
                LibraryOperation::Allocate { slot, size, stream } => {
                    let address = self.functions.allocate(size, stream);
                    self.slots[slot as usize] = (address != 0).then_some(Live {
                        address,
                        size,
                        stream,
                    });
                    if address == 0 && self.refused.len() < MOST_REFUSED {
                        self.refused.push(number);
                    }
                }
                LibraryOperation::Free { slot } => self.free(slot as usize),
                LibraryOperation::RecordStream { slot, stream } => {
                    if let Some(live) = self.slots[slot as usize] {
                        // SAFETY: a live address belongs to the library.
                        unsafe { self.functions.record_stream(live.address, stream) };
                    }
                }
                LibraryOperation::EmptyCache => self.functions.empty_cache(),
                // The harness judges the results.
                LibraryOperation::Synchronize => drop(ask(LibraryCall::Synchronize)),
                LibraryOperation::SynchronizeStream(stream) => {
                    let _ = ask(LibraryCall::SynchronizeStream(stream));
                }
            }
        }
    }

    fn free(&mut self, slot: usize) {
        if let Some(Live {
            address,
            size,
            stream,
        }) = self.slots[slot].take()
        {
            // SAFETY: the library returned the address, and it is freed once.
            unsafe { self.functions.free(address, size, stream) };
        }
    }
}
