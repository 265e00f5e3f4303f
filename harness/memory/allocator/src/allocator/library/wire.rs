//! The messages between the harness and a library's process: one line of JSON each, over one
//! socket. The harness sends an order. The process requests each CUDA call of the library, gets its
//! result, and finally reports that the order is done. A timed program ([`LibraryProgram`]) is one
//! order.

use std::io::{self, BufRead, Write};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::LibrarySpec;

/// A message of the harness.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    Load(LibrarySpec),
    /// Call its allocation function. [`Reply::Done`] has the address.
    Allocate {
        size: u64,
        stream: u32,
    },
    /// Call its free function.
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
    /// Call its function that empties the cache.
    EmptyCache,
    /// Run the program and request only CUDA calls. The answer is [`Reply::Timed`].
    Time(LibraryProgram),
    End,
    /// The result of a [`Reply::Call`].
    Answer {
        code: Code,
        value: u64,
    },
}

/// A program to time in the library's process. At its end all live allocations are freed outside
/// the timed part.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LibraryProgram {
    pub before: Vec<LibraryOperation>,
    pub timed: Vec<LibraryOperation>,
    pub times: u64,
}

/// One operation of a [`LibraryProgram`]. Slots number the live allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LibraryOperation {
    /// A refused request leaves the slot empty.
    Allocate { slot: u32, size: u64, stream: u32 },
    /// Ignores an empty slot.
    Free { slot: u32 },
    /// Ignores an empty slot.
    RecordStream { slot: u32, stream: u32 },
    /// Release what is cached.
    EmptyCache,
    /// Wait for all work of the device.
    Synchronize,
    /// Wait for all work of a stream.
    SynchronizeStream(u32),
}

impl LibraryOperation {
    pub const fn slot(&self) -> Option<u32> {
        match *self {
            Self::Allocate { slot, .. } | Self::Free { slot } | Self::RecordStream { slot, .. } => {
                Some(slot)
            }
            Self::EmptyCache | Self::Synchronize | Self::SynchronizeStream(_) => None,
        }
    }
}

/// The result of a [`LibraryProgram`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timed {
    /// The time of the timed part, without waits for the harness.
    pub nanos: u64,
    /// The numbers of the refused requests, counted from 0 over `before` and `timed`. Limited to
    /// the first ones.
    pub refused: Vec<u64>,
}

/// A message of the library's process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    Done(u64),
    /// An [`Order::Time`] is done, with this result.
    Timed(Timed),
    /// The timed part of an [`Order::Time`] starts or ends. It has no answer.
    Timing(bool),
    /// The library cannot be used, for this reason.
    Refused(String),
    /// The library called a CUDA function that is not passed on. It gets the error "not supported".
    Unanswered(String),
    Call(LibraryCall),
}

/// A device call of a library. Streams and events are the harness's numbers. `CreatePool` and
/// `Create`, for physical memory, return a number too; pool 0 is the device's default pool, which
/// always exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LibraryCall {
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
    Reserve(u64),
    Unreserve(u64),
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
    Granularity,
    HasPools,
    HasMapping,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PoolFigure {
    Threshold,
    Reserved,
    ReservedHigh,
    Used,
    UsedHigh,
}

/// The result of a call, with the codes that driver and runtime share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Code {
    Success = 0,
    InvalidValue = 1,
    OutOfMemory = 2,
    InvalidHandle = 400,
    NotReady = 600,
    NotSupported = 801,
    /// The other process has ended.
    Unknown = 999,
}

/// Fails if the other process has ended.
pub fn send(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)
}

/// Waits for one message. `None` means that the other process has ended.
/// Fails for an invalid message.
pub fn receive<T: DeserializeOwned>(from: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = String::new();
    if from.read_line(&mut line)? == 0 {
        Ok(None)
    } else {
        Ok(Some(serde_json::from_str(&line)?))
    }
}

#[cfg(test)]
mod tests;
