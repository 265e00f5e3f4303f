//! Converts a reduced trace to a scenario with one step per operation: [`scenario`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use harness_allocator::{allocator::caching::Config, device::StreamId, units::Bytes};
use harness_language::text::exact_size;
use harness_trace::trace::TraceEvent;

use super::{Shrunk, TraceFailure};

const REQUEST: &str = "request";

/// Why a trace cannot be converted. It can still be written as a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAScenario {
    /// The contexts of private pools overlap without being nested.
    #[error("the contexts of its private pools overlap, which a scenario cannot express")]
    PoolsOverlap,
}

/// Returns the scenario as YAML. `about` describes it, `expect` states how the last request ends,
/// and `comment` returns the call site of an event of the original trace, if known.
pub fn scenario(
    shrunk: &Shrunk,
    about: &str,
    expect: &str,
    comment: impl Fn(usize) -> Option<String>,
) -> Result<String, NotAScenario> {
    let mut text = String::from("about: |\n");
    for line in about.lines() {
        let _ = writeln!(text, "{}", format!("  {line}").trim_end());
    }
    let _ = writeln!(
        text,
        "needs: {{ memory: {} }}",
        exact_size(shrunk.case.memory)
    );
    text += &arms(shrunk);
    let streams = streams(&shrunk.case.events);
    if !streams.is_empty() {
        let _ = writeln!(
            text,
            "streams: [{}]",
            streams.values().cloned().collect::<Vec<_>>().join(", ")
        );
    }
    text += "steps:\n";
    // A replay with checks fills its allocations, and none of its operations is the failing one.
    let fills = matches!(shrunk.failure, TraceFailure::Violates(_));
    let mut steps = Steps {
        text,
        streams,
        external_memory: Bytes::ZERO,
        open: Vec::new(),
        fills,
    };
    for (index, &event) in shrunk.case.events.iter().enumerate() {
        let is_request = !fills && index + 1 == shrunk.case.events.len();
        let ending = match event {
            _ if is_request => Some(expect),
            TraceEvent::Allocate { id, .. } if shrunk.may_fail.contains(&id) => Some("any"),
            _ => None,
        };
        let name = |id: u64| {
            if is_request {
                REQUEST.to_owned()
            } else {
                format!("b{id}")
            }
        };
        let comment = comment(shrunk.origins[index]);
        steps.add(event, name, ending, comment.as_deref())?;
    }
    Ok(steps.text)
}

/// The allocators: PyTorch's with the case's settings, and with the settings to compare with.
fn arms(shrunk: &Shrunk) -> String {
    let arm = |name: Option<&str>, config: &Config| {
        let conf = config.to_string();
        let name = name.map(|name| format!("name: {name}"));
        let conf = (!conf.is_empty()).then(|| format!("conf: \"{conf}\""));
        let fields: Vec<String> = name.into_iter().chain(conf).collect();
        if fields.is_empty() {
            "  - caching\n".to_owned()
        } else {
            format!("  - caching: {{ {} }}\n", fields.join(", "))
        }
    };
    let arms = match &shrunk.other {
        None => arm(None, &shrunk.case.config),
        Some(other) => {
            let (failing, serving) = if shrunk.fails_under_its_own {
                (&shrunk.case.config, other)
            } else {
                (other, &shrunk.case.config)
            };
            arm(Some("fails"), failing) + &arm(Some("serves"), serving)
        }
    };
    format!("allocators:\n{arms}")
}

/// Names of the streams besides the default stream.
fn streams(events: &[TraceEvent]) -> BTreeMap<StreamId, String> {
    let used = events
        .iter()
        .filter_map(|&(mut event)| event.stream_mut().copied());
    let named: BTreeSet<StreamId> = used.filter(|&stream| stream != StreamId::DEFAULT).collect();
    named
        .into_iter()
        .enumerate()
        .map(|(index, stream)| (stream, format!("side{}", index + 1)))
        .collect()
}

struct Steps {
    text: String,
    streams: BTreeMap<StreamId, String>,
    external_memory: Bytes,
    /// Open private pools, innermost last.
    open: Vec<u32>,
    fills: bool,
}

impl Steps {
    fn add(
        &mut self,
        event: TraceEvent,
        name: impl Fn(u64) -> String,
        ending: Option<&str>,
        comment: Option<&str>,
    ) -> Result<(), NotAScenario> {
        let step = match event {
            TraceEvent::Allocate { id, size, stream } => {
                let stream = self.streams.get(&stream);
                let on = stream.map_or_else(String::new, |stream| format!(", stream: {stream}"));
                let ending = ending.map_or_else(String::new, |end| format!(", expect: {end}"));
                let (name, size) = (name(id), exact_size(size));
                let alloc = format!("alloc: {{ buffer: {name}, size: {size}{on}{ending} }}");
                self.line(&alloc, comment);
                if self.fills {
                    self.line(&format!("fill: {{ buffer: {name}{on} }}"), None);
                }
                return Ok(());
            }
            TraceEvent::Free { id } => format!("free: {}", name(id)),
            TraceEvent::RecordStream { id, stream } => {
                let stream = self.stream(stream);
                // Adds pending work, so that the memory waits after the free as in the replay.
                self.line(&format!("busy: {{ stream: {stream}, duration: 1s }}"), None);
                format!(
                    "record_stream: {{ buffer: {}, stream: {stream} }}",
                    name(id)
                )
            }
            TraceEvent::SynchronizeStream(stream) => {
                format!("synchronize: {{ stream: {} }}", self.stream(stream))
            }
            TraceEvent::Synchronize => "synchronize: device".to_owned(),
            TraceEvent::EmptyCache => "empty_cache".to_owned(),
            TraceEvent::ResetPeaks => "reset_peak_stats".to_owned(),
            TraceEvent::SetFraction(fraction) => format!("set_memory_fraction: {}", fraction.get()),
            TraceEvent::ExternalMemory(change) => {
                self.external_memory = Bytes(self.external_memory.0.saturating_add_signed(change));
                format!("external_memory: {}", exact_size(self.external_memory))
            }
            TraceEvent::BeginPool(pool) => {
                self.line(&format!("private_pool: pool{}", pool.0), None);
                let indent = self.indent();
                let _ = writeln!(self.text, "{indent}  steps:");
                self.open.push(pool.0);
                return Ok(());
            }
            TraceEvent::EndPool(pool) => {
                return if self.open.pop() == Some(pool.0) {
                    Ok(())
                } else {
                    Err(NotAScenario::PoolsOverlap)
                };
            }
            TraceEvent::ReleasePool(pool) => format!("release_pool: pool{}", pool.0),
        };
        self.line(&step, comment);
        Ok(())
    }

    fn stream(&self, stream: StreamId) -> String {
        self.streams
            .get(&stream)
            .cloned()
            .unwrap_or_else(|| "default".to_owned())
    }

    fn indent(&self) -> String {
        "    ".repeat(self.open.len()) + "  "
    }

    fn line(&mut self, step: &str, comment: Option<&str>) {
        let comment = comment
            .map(|comment| format!("  # {comment}"))
            .unwrap_or_default();
        let indent = self.indent();
        let _ = writeln!(self.text, "{indent}- {step}{comment}");
    }
}
