//! Timelines of traced runs in the Trace Event Format of Perfetto (<https://ui.perfetto.dev>) and
//! chrome://tracing:
//! <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>.

use std::collections::BTreeMap;

use harness_allocator::device::{Clock, StreamId};
use harness_allocator::units::{Bytes, Nanos};
use harness_base::words::count;
use harness_record::timeline::{Timeline, TimelineEntry, Track};
use serde_json::{Value, json};

/// Rows of a process, in display order. Streams follow.
const STEPS: u32 = 1;
const CALLS: u32 = 2;
const FIRST_STREAM: u32 = 10;

/// Renders one document. Each run is a process with rows for steps, driver calls and streams, and
/// memory counters.
pub fn render(timelines: &[Timeline]) -> String {
    let runs = timelines.iter().zip(1u32..);
    let events: Vec<String> = runs
        .flat_map(|(timeline, run)| events(timeline, run))
        .map(|event| event.to_string())
        .collect();
    // One event per line keeps parts of a long document readable.
    format!(
        "{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n{}\n]}}\n",
        events.join(",\n")
    )
}

fn events(timeline: &Timeline, run: u32) -> Vec<Value> {
    let named = |what: &str, row: u32, name: &str| {
        let args = json!({ "name": name });
        json!({ "ph": "M", "name": what, "pid": run, "tid": row, "args": args })
    };
    let mut events = vec![named("process_name", 0, &name(timeline))];
    let mut rows: BTreeMap<u32, String> = BTreeMap::from([
        (STEPS, "steps".to_owned()),
        (CALLS, "driver calls".to_owned()),
    ]);
    let names: BTreeMap<StreamId, &str> = timeline
        .streams
        .iter()
        .map(|(stream, name)| (*stream, name.as_str()))
        .collect();
    for entry in &timeline.entries {
        if let TimelineEntry::Span {
            track: Track::Stream(stream),
            ..
        } = entry
        {
            let name = names
                .get(stream)
                .map_or_else(|| stream.0.to_string(), |name| (*name).to_owned());
            rows.entry(row(Track::Stream(*stream)))
                .or_insert_with(|| format!("stream {name}"));
        }
    }
    for (row, name) in &rows {
        events.push(named("thread_name", *row, name));
        events.push(
            json!({ "ph": "M", "name": "thread_sort_index", "pid": run, "tid": row,
            "args": { "sort_index": row } }),
        );
    }
    events.extend(timeline.entries.iter().map(|entry| event(entry, run)));
    events
}

fn name(timeline: &Timeline) -> String {
    let Timeline {
        scenario,
        allocator,
        repetition,
        device,
        clock,
        left_out,
        ..
    } = timeline;
    let repetition = if *repetition > 0 {
        format!(", repetition {}", repetition + 1)
    } else {
        String::new()
    };
    let times = if *clock == Clock::Simulated {
        ", model times"
    } else {
        ""
    };
    let rest = if *left_out > 0 {
        format!(", without the last {}", count(*left_out, "entry"))
    } else {
        String::new()
    };
    format!("{scenario} with {allocator}{repetition} on {device}{times}{rest}")
}

const fn row(track: Track) -> u32 {
    match track {
        Track::Steps => STEPS,
        Track::Calls => CALLS,
        Track::Stream(stream) => FIRST_STREAM + stream.0,
    }
}

fn event(entry: &TimelineEntry, run: u32) -> Value {
    match entry {
        TimelineEntry::Span {
            track,
            name,
            start,
            duration,
            size,
            failure,
        } => {
            let name = size.map_or_else(|| name.clone(), |size| format!("{name} {size}"));
            let mut event = json!({
                "ph": "X", "name": name, "pid": run, "tid": row(*track), "ts": microseconds(*start),
                "dur": microseconds(*duration), "args": {},
            });
            if let Some(bytes) = size {
                event["args"]["bytes"] = json!(bytes.0);
            }
            if let Some(failure) = failure {
                event["args"]["failure"] = json!(failure);
                // A red of the format's fixed palette.
                event["cname"] = json!("terrible");
            }
            event
        }
        TimelineEntry::Memory {
            at,
            allocated,
            active,
            reserved,
        } => {
            // The viewer stacks the counters, so each is a difference to the one below.
            let more = |bytes: &Bytes, than: &Bytes| bytes.0.saturating_sub(than.0);
            json!({
                "ph": "C", "name": "memory", "pid": run, "ts": microseconds(*at),
                "args": {
                    "allocated": allocated.0,
                    "waiting for events": more(active, allocated),
                    "reserved, not in use": more(reserved, active),
                },
            })
        }
        TimelineEntry::Refused { at, size } => json!({
            "ph": "i", "s": "p", "name": format!("out of memory: {size}"), "pid": run, "tid": STEPS,
            "ts": microseconds(*at), "args": { "bytes": size.0 },
        }),
    }
}

fn microseconds(time: Nanos) -> f64 {
    time.0 as f64 / 1000.0
}

#[cfg(test)]
mod tests;
