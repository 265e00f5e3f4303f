//! Reads logs of RMM's `logging_resource_adaptor` as snapshots. They are CSV files with the columns
//! `Thread,Time,Action,Pointer,Size,Stream`:
//! <https://github.com/rapidsai/rmm/blob/branch-25.10/cpp/include/rmm/mr/device/logging_resource_adaptor.hpp>.
//!
//! RMM frees in stream order, so one `free` line becomes both events of a free. The log contains
//! neither segments nor the free memory at a failed request.

use std::io::{BufRead, BufReader, Read};

use harness_allocator::units::Bytes;
use harness_base::words::count;

use super::budget::{self, Budget};
use super::{Action, Event, ExtraId, Snapshot, StackId, Value, error::SnapshotError};

pub const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream";

/// Maximum length of a line in bytes. RMM writes about 80.
const MAX_LINE: u64 = 4096;

pub(super) fn read(source: impl Read, budget: &Budget) -> Result<Snapshot, SnapshotError> {
    let mut source = BufReader::new(source);
    let (mut snapshot, mut events, mut failures) = (Snapshot::default(), Vec::new(), 0_u64);
    let (mut newest, mut text) = (ExtraId::NONE, Vec::new());
    for line in 1.. {
        text.clear();
        if source
            .by_ref()
            .take(MAX_LINE)
            .read_until(b'\n', &mut text)?
            == 0
        {
            break;
        }
        let text = String::from_utf8_lossy(&text);
        let text = text.trim();
        // Merged logs of several processes repeat the header.
        if text.is_empty() || text == HEADER {
            continue;
        }
        let row = Row::parse(text).map_err(|expected| SnapshotError::LogLine {
            line,
            text: text.chars().take(120).collect(),
            expected,
        })?;
        failures += u64::from(row.actions == [Action::Oom]);
        let extra = snapshot.extras.intern(vec![(
            "thread".to_owned(),
            Value::Text(row.thread.to_owned()),
        )]);
        if extra > newest {
            newest = extra;
            budget.add(256 + 2 * row.thread.len());
        }
        budget.take(row.actions.len() * size_of::<Event>())?;
        events.extend(row.actions.iter().map(|&action| Event {
            action,
            extra,
            ..row.event
        }));
    }
    snapshot
        .notes
        .push("An RMM log contains no segments and no call stacks.".to_owned());
    if failures > 0 {
        snapshot.notes.push(format!(
            "{} failed. An RMM log does not contain the free memory, so 0 is shown.",
            count(failures, "request")
        ));
    }
    snapshot.traces.push(events);
    Ok(snapshot)
}

struct Row<'a> {
    thread: &'a str,
    actions: &'static [Action],
    /// The event of the first action.
    event: Event,
}

impl<'a> Row<'a> {
    /// Returns a description of the accepted form on error.
    fn parse(line: &'a str) -> Result<Self, &'static str> {
        let fields: Vec<&str> = line.split(',').collect();
        let [thread, time, action, pointer, size, stream] = fields[..] else {
            return Err("six fields, as in Thread,Time,Action,Pointer,Size,Stream");
        };
        let actions: &[Action] = match action {
            "allocate" => &[Action::Alloc],
            "free" | "deallocate" => &[Action::FreeRequested, Action::FreeCompleted],
            "allocate failure" => &[Action::Oom],
            _ => return Err("the action `allocate`, `free` or `allocate failure`"),
        };
        let is_oom = actions == [Action::Oom];
        let size = size
            .parse()
            .ok()
            .filter(|&size| is_oom || size <= budget::DEVICE.0);
        let event = Event {
            action: actions[0],
            address: if is_oom {
                0
            } else {
                number(pointer).ok_or("an address like 0x7f8a40000000 in the fourth field")?
            },
            size: size
                .map(Bytes)
                .ok_or("a size of at most 1 TiB, in bytes, in the fifth field")?,
            stream: number(stream).ok_or("a stream like 0x2 or 0 in the sixth field")?,
            time_us: time_us(time),
            stack: StackId::EMPTY,
            extra: ExtraId::NONE,
        };
        Ok(Self {
            thread,
            actions,
            event,
        })
    }
}

/// Parses a pointer as `%p` prints it, or a decimal number.
fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None if text == "(nil)" => Some(0),
        None => text.parse().ok(),
    }
}

/// Parses `HH:MM:SS.ffffff` since midnight, or seconds since 1970, into microseconds.
fn time_us(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let seconds = whole.split(':').try_fold(0_u64, |sum, part| {
        sum.checked_mul(60)?.checked_add(part.parse().ok()?)
    })?;
    let digits = fraction.get(..6).unwrap_or(fraction);
    let micros: u64 = digits.parse().ok()?;
    seconds
        .checked_mul(1_000_000)?
        .checked_add(micros * 10_u64.pow(6 - digits.len() as u32))
}
