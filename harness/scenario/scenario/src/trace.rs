//! [`Trace`]: a file with the operations of an allocation trace.

use std::{collections::BTreeMap, fmt, io::Read as _, path::Path};

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

    /// Makes a trace from operations with their comments, which may be empty. Each id is allocated
    /// once. An error is a message and an advice.
    pub fn commented<'s>(
        operations: impl IntoIterator<Item = (TraceEvent, &'s str)>,
    ) -> Result<Self, (String, String)> {
        let mut trace = Self {
            sites: vec![String::new()],
            ..Self::default()
        };
        let mut known = BTreeMap::from([(String::new(), 0)]);
        for (line, (event, site)) in (1..).zip(operations) {
            trace.add(event, site.trim(), line, &mut known);
        }
        trace.not_empty()
    }

    fn add(&mut self, event: TraceEvent, site: &str, line: u32, known: &mut BTreeMap<String, u32>) {
        let next = self.sites.len() as u32;
        let site = *known.entry(site.to_owned()).or_insert_with(|| {
            self.sites.push(site.to_owned());
            next
        });
        self.events.push(event);
        self.site_of.push(site);
        self.lines.push(line);
    }

    fn not_empty(self) -> Result<Self, (String, String)> {
        if self.events.is_empty() {
            return Err((
                "the trace has no operations".to_owned(),
                "name a trace with operations".to_owned(),
            ));
        }
        Ok(self)
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
            trace.add(event, site, line_number as u32, &mut known);
        }
        trace.not_empty()
    }

    /// Reads a file, compressed with gzip or not.
    pub fn read(path: &Path) -> Result<Self, (String, String)> {
        let mut text = String::new();
        let read = packed::open(path).and_then(|mut file| file.read_to_string(&mut text));
        read.map_err(|error| {
            (
                format!("cannot be read: {error}"),
                "name a trace; paths in a scenario are relative to the folder of the scenario"
                    .to_owned(),
            )
        })?;
        Self::parse(&text)
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

/// The text of a trace, with a comment for each operation that has one.
impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (operation, event) in self.events.iter().enumerate() {
            match self.site(operation) {
                Some(site) => writeln!(f, "{event} # {site}")?,
                None => writeln!(f, "{event}")?,
            }
        }
        Ok(())
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
        assert_eq!(
            trace.to_string(),
            "a 1 512 0 # model.py:41\na 2 512 0\nf 1 # model.py:41\n"
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
