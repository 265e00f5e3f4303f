//! What the harness and the process of a library say to each other: one line of JSON each, over one socket. The harness gives an order, the process asks for
//! as many calls as the library makes, gets an answer to each, and says at last that the order is done. A program to be timed ([`Program`]) is one order.

use std::io::{self, BufRead, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// From the harness.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum Order {
    /// Load the library.
    Load,
    /// Call its function that hands out memory; the address is the value of [`Reply::Done`].
    Allocate {
        size: u64,
        stream: u32,
    },
    /// Call its function that takes memory back.
    Free {
        address: u64,
        size: u64,
        stream: u32,
    },
    /// Call its function for uses by other streams.
    RecordStream {
        address: u64,
        stream: u32,
    },
    /// Call its function that gives cached memory back.
    EmptyCache,
    /// Do all of it without asking the harness for anything but calls of CUDA; answered by [`Reply::Timed`].
    Time(Program),
    End,
    /// The answer to a [`Reply::Call`].
    Answer {
        code: Code,
        value: u64,
    },
}

/// What is timed in the process of the library. Whatever it leaves live is freed at its end, and not timed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Done first, and not timed.
    pub before: Vec<Operation>,
    /// Timed.
    pub timed: Vec<Operation>,
    /// How often `timed` is done in a row.
    pub times: u64,
}

/// One operation of a [`Program`]. What is live is known by slots, which the program numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum Operation {
    /// A request that is refused leaves the slot empty.
    Allocate {
        slot: u32,
        size: u64,
        stream: u32,
    },
    /// Passed over where the slot is empty.
    Free {
        slot: u32,
    },
    /// The same.
    RecordStream {
        slot: u32,
        stream: u32,
    },
    EmptyCache,
    /// Wait for all work of the device.
    Synchronize,
    SynchronizeStream(u32),
}

impl Operation {
    /// The slot that it names.
    #[must_use]
    pub const fn slot(&self) -> Option<u32> {
        match *self {
            Self::Allocate { slot, .. } | Self::Free { slot } | Self::RecordStream { slot, .. } => Some(slot),
            Self::EmptyCache | Self::Synchronize | Self::SynchronizeStream(_) => None,
        }
    }
}

/// What came of a [`Program`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timed {
    /// The time of what was timed, without the time in which the harness was waited for.
    pub nanos: u64,
    /// The requests that were refused: each operation by its number, counted from 0 over `before` and `timed`. The first ones, where there are very many.
    pub refused: Vec<u64>,
}

/// From the process of the library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The order was done, and this is what came of it.
    Done(u64),
    /// The same for [`Order::Time`].
    Timed(Timed),
    /// In an [`Order::Time`] the timed part begins, or ends. It is not answered.
    Timing(bool),
    /// The library cannot be used: why.
    Refused(String),
    /// The library calls this function of CUDA, which has no answer here: it is told that it is not supported.
    Unanswered(String),
    /// The library asks this of the device.
    Call(Call),
}

/// What a library asks of the device. Streams and events are numbers of the harness.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum Call {
    Allocate(u64),
    Free(u64),
    FreeMemory,
    TotalMemory,
    Synchronize,
    SynchronizeStream(u32),
    CreateStream,
    DestroyStream(u32),
    CreateEvent,
    DestroyEvent(u32),
    RecordEvent {
        event: u32,
        stream: u32,
    },
    QueryEvent(u32),
    SynchronizeEvent(u32),
    WaitEvent {
        stream: u32,
        event: u32,
    },
    /// A pool, whose number is the answer. Pool 0 is the device's default pool, which is always there.
    CreatePool,
    DestroyPool(u32),
    AllocateFrom {
        pool: u32,
        size: u64,
        stream: u32,
    },
    FreeAsync {
        address: u64,
        stream: u32,
    },
    TrimPool {
        pool: u32,
        keep: u64,
    },
    SetThreshold {
        pool: u32,
        bytes: u64,
    },
    Pool {
        pool: u32,
        figure: PoolFigure,
    },
    /// Addresses without memory.
    Reserve(u64),
    Unreserve(u64),
    /// Memory without addresses, whose number is the answer.
    Create(u64),
    Release(u64),
    Map {
        address: u64,
        size: u64,
        memory: u64,
    },
    Unmap {
        address: u64,
        size: u64,
    },
    /// What sizes of memory without addresses are multiples of.
    Granularity,
    HasPools,
    HasMapping,
}

/// What a pool is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum PoolFigure {
    Threshold,
    Reserved,
    ReservedHigh,
    Used,
    UsedHigh,
}

/// How a call ended, by the numbers that the driver and the runtime have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum Code {
    Success = 0,
    InvalidValue = 1,
    OutOfMemory = 2,
    InvalidHandle = 400,
    NotReady = 600,
    NotSupported = 801,
    /// The other side has gone, or nobody listens.
    Unknown = 999,
}

/// Sends one message.
///
/// # Errors
/// The other side has gone.
pub fn send(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)
}

/// Waits for one message. `None`: the other side has gone.
///
/// # Errors
/// What came is no message.
pub fn receive<T: DeserializeOwned>(from: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = String::new();
    if from.read_line(&mut line)? == 0 { Ok(None) } else { Ok(Some(serde_json::from_str(&line)?)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_arrives_as_it_was_sent_and_the_end_is_told() {
        let mut line = Vec::new();
        let sent = Reply::Call(Call::WaitEvent { stream: 3, event: u32::MAX });
        send(&mut line, &sent).expect("there is room");
        let mut from = line.as_slice();
        assert_eq!(receive::<Reply>(&mut from).expect("it is a message"), Some(sent));
        assert_eq!(receive::<Reply>(&mut from).expect("it is the end"), None);
    }
}
