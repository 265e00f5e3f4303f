//! [`Trace`]: a file with the operations of an allocation trace.

use std::{collections::BTreeMap, io::Read as _, path::Path};

use harness_allocator::device::StreamId;
use harness_base::{excerpt::shortened, packed};
use harness_trace::trace::{self, TraceEvent};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// In order. Each id is allocated once.
    pub events: Vec<TraceEvent>,
    /// For each operation, the index of its comment in `sites`.
    site_of: Vec<u32>,
    /// For each operation, its line, counted from 1.
    lines: Vec<u32>,
    /// Distinct comments. The first is empty.
    sites: Vec<String>,
}

impl Trace {
    /// Makes a trace without comments and with one operation per line. Each id is allocated once.
    pub fn of(events: Vec<TraceEvent>) -> Self {
        Self {
            site_of: vec![0; events.len()],
            lines: (1..).take(events.len()).collect(),
            sites: vec![String::new()],
            events,
        }
    }

    /// The comment of an operation. In a recorded trace it is the position in the program.
    pub fn site(&self, operation: usize) -> Option<&str> {
        let site = &self.sites[self.site_of[operation] as usize];
        (!site.is_empty()).then_some(site.as_str())
    }

    pub fn line(&self, operation: usize) -> u32 {
        self.lines[operation]
    }

    /// Parses a trace with its comments. An error is a message and an advice, for the first line
    /// that is not an operation or that allocates an id again.
    pub fn parse(text: &str) -> Result<Self, (String, String)> {
        let mut trace = Self {
            sites: vec![String::new()],
            ..Self::default()
        };
        let mut known = BTreeMap::from([(String::new(), 0)]);
        let mut allocated = BTreeMap::new();
        for (index, line) in text.lines().enumerate() {
            let line_number = index + 1;
            let wrong = |error: trace::TraceError| {
                (
                    format!(
                        "line {line_number}: `{}` is not an operation of an allocation trace",
                        shortened(&error.text)
                    ),
                    error.expected.to_owned(),
                )
            };
            let events = trace::parse_lines([line]).map_err(wrong)?;
            let Some(&event) = events.first() else {
                continue;
            };
            if let TraceEvent::Allocate { id, .. } = event
                && let Some(before) = allocated.insert(id, line_number)
            {
                let message = format!(
                    "line {line_number}: id {id} is allocated twice; the first time is in line \
                     {before}"
                );
                return Err((message, "use each id for one allocation".to_owned()));
            }
            let site = line
                .split_once('#')
                .map_or("", |(_, comment)| comment.trim());
            let next = trace.sites.len() as u32;
            let site = *known.entry(site.to_owned()).or_insert_with(|| {
                trace.sites.push(site.to_owned());
                next
            });
            trace.events.push(event);
            trace.site_of.push(site);
            trace.lines.push(line_number as u32);
        }
        if trace.events.is_empty() {
            return Err((
                "the trace has no operations".to_owned(),
                "name a trace with operations".to_owned(),
            ));
        }
        Ok(trace)
    }

    /// Reads a file, compressed with gzip or not.
    pub fn read(path: &Path) -> Result<Self, (String, String)> {
        Self::read_with_text(path).map(|(trace, _)| trace)
    }

    pub fn read_with_text(path: &Path) -> Result<(Self, String), (String, String)> {
        let mut text = String::new();
        let read = packed::open(path).and_then(|mut file| file.read_to_string(&mut text));
        read.map_err(|error| {
            (
                format!("cannot be read: {error}"),
                "name a trace; paths in a scenario are relative to the folder of the scenario"
                    .to_owned(),
            )
        })?;
        Ok((Self::parse(&text)?, text))
    }

    pub(crate) fn streams(&self) -> impl Iterator<Item = StreamId> + '_ {
        let streams = self.events.iter().filter_map(|event| match *event {
            TraceEvent::Allocate { stream, .. }
            | TraceEvent::RecordStream { stream, .. }
            | TraceEvent::SynchronizeStream(stream) => Some(stream),
            _ => None,
        });
        streams.filter(|&stream| stream != StreamId::DEFAULT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_keeps_its_comments_and_says_what_is_wrong_with_a_line() {
        let trace =
            Trace::parse("# head\n\na 1 512 0 # model.py:41\na 2 512 0\nf 1 # model.py:41\n")
                .expect("a trace");
        let sites: Vec<_> = (0..3).map(|operation| trace.site(operation)).collect();
        assert_eq!(
            (sites, trace.sites.len()),
            (vec![Some("model.py:41"), None, Some("model.py:41")], 2)
        );
        for (text, message) in [
            ("# nothing\n", "the trace has no operations"),
            (
                "d\na 1 x 0\n",
                "line 2: `a 1 x 0` is not an operation of an allocation trace",
            ),
            (
                "a 1 5 0\nf 1\na 1 5 0\n",
                "line 3: id 1 is allocated twice; the first time is in line 1",
            ),
        ] {
            assert_eq!(Trace::parse(text).expect_err(text).0, message);
        }
    }
}
