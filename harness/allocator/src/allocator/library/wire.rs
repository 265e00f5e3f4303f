//! What the harness and the process of a library say to each other: one line of JSON each, over one socket. The harness gives an order, the process asks for
//! as many calls as the library makes, gets an answer to each, and says at last that the order is done.

use std::io::{self, BufRead, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// From the harness.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    End,
    /// The answer to a [`Reply::Call`].
    Answer {
        code: Code,
        value: u64,
    },
}

/// From the process of the library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The order was done, and this is what came of it.
    Done(u64),
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
    RecordEvent { event: u32, stream: u32 },
    QueryEvent(u32),
    SynchronizeEvent(u32),
    WaitEvent { stream: u32, event: u32 },
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
