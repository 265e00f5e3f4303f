//! Excerpts of a text with marked errors. [`Excerpt`] cuts long lines to the characters around the
//! marks; [`shortened`] cuts a text within a sentence.
//!
//! A file can be one line of many megabytes, which an error message must not print.

use std::{borrow::Cow, ops::Range};

use crate::printable::{acts, printable};
use miette::{LabeledSpan, MietteError, MietteSpanContents, SourceCode, SourceSpan, SpanContents};

/// Characters shown on each side of a mark, and at most within it.
const AROUND: usize = 60;
/// Longest line, in characters, that is shown whole.
const WHOLE: usize = 200;
/// Characters kept at each end of a long message.
const KEPT: usize = 160;
/// Replaces omitted text.
const LEFT_OUT: char = '…';

/// Returns the text, or its beginning and end if it is too long for a message. Both ends are kept
/// because an error follows the text that it quotes.
pub fn shortened(text: &str) -> Cow<'_, str> {
    let place = |(at, _): (usize, char)| at;
    let (beginning, end) = (
        text.char_indices().nth(KEPT).map(place),
        text.char_indices().nth_back(KEPT - 1).map(place),
    );
    match (beginning, end) {
        (Some(beginning), Some(end)) if text.char_indices().nth(2 * KEPT).is_some() => {
            Cow::Owned(format!("{}{LEFT_OUT}{}", &text[..beginning], &text[end..]))
        }
        _ => Cow::Borrowed(text),
    }
}

/// A text with marks for display.
#[derive(Clone, Debug)]
pub struct Excerpt {
    name: String,
    text: String,
    labels: Vec<LabeledSpan>,
    /// Pairs of a byte offset in the cut text and the column in the original text, counted from 0.
    columns: Vec<(usize, usize)>,
}

impl Excerpt {
    pub fn new(name: impl Into<String>, source: &str, places: &[(Range<usize>, String)]) -> Self {
        let mut excerpt = Self {
            name: printable(&name.into()).into_owned(),
            text: String::new(),
            labels: Vec::new(),
            columns: Vec::new(),
        };
        let mut found: Vec<Option<(usize, usize)>> = vec![None; places.len()];
        let mut start = 0;
        // An empty line follows the last line feed.
        for line in source.split('\n') {
            let line = &source[start..source.len().min(start + line.len() + 1)];
            let is_last = !line.ends_with('\n');
            let here = |at: usize| {
                (start..start + line.len()).contains(&at) || (is_last && at == source.len())
            };
            let mine: Vec<usize> = (0..places.len())
                .filter(|&index| here(places[index].0.start))
                .collect();
            let ranges: Vec<Range<usize>> = mine
                .iter()
                .map(|&index| within(line, &places[index].0, start))
                .collect();
            for (index, (range, column)) in mine.into_iter().zip(excerpt.add(line, &ranges)) {
                excerpt.columns.push((range.start, column));
                found[index] = Some((range.start, range.len()));
            }
            start += line.len();
        }
        let known = places
            .iter()
            .zip(found)
            .filter_map(|((_, label), found)| Some((label.clone(), found?)));
        excerpt.labels = known
            .enumerate()
            .map(|(index, (label, span))| match index {
                0 => LabeledSpan::new_primary_with_span(Some(label), span),
                _ => LabeledSpan::new_with_span(Some(label), span),
            })
            .collect();
        excerpt
    }

    pub fn labels(&self) -> impl Iterator<Item = LabeledSpan> + '_ {
        self.labels.iter().cloned()
    }

    fn add(&mut self, line: &str, ranges: &[Range<usize>]) -> Vec<(Range<usize>, usize)> {
        let length = line.chars().count();
        let is_line_feed = |at: usize| at + 1 == length && line.ends_with('\n');
        let is_shown = |at: usize| match ranges {
            _ if length <= WHOLE => true,
            _ if is_line_feed(at) => true,
            [] => at < AROUND,
            _ => ranges.iter().any(|range| {
                (range.start.saturating_sub(AROUND)..shown_end(range) + AROUND).contains(&at)
            }),
        };
        // Byte offsets of the start and end of each range.
        let mut places = vec![(0, 0); ranges.len()];
        let mut left_out = false;
        for (at, character) in line.chars().chain([' ']).enumerate() {
            if at < length && !is_shown(at) {
                left_out = true;
                continue;
            }
            if std::mem::take(&mut left_out) {
                self.text.push(LEFT_OUT);
            }
            for (range, place) in ranges.iter().zip(&mut places) {
                if at == range.start {
                    place.0 = self.text.len();
                }
                if at <= shown_end(range) {
                    place.1 = self.text.len();
                }
            }
            if at < length {
                self.text.push(
                    if acts(character) && !matches!(character, '\n' | '\r' | '\t') {
                        '\u{fffd}'
                    } else {
                        character
                    },
                );
            }
        }
        ranges
            .iter()
            .zip(places)
            .map(|(range, (start, end))| (start..end.max(start), range.start))
            .collect()
    }
}

fn shown_end(range: &Range<usize>) -> usize {
    range.end.min(range.start + 2 * AROUND)
}

/// Converts a byte range of the whole text to characters of the line that starts at `start`.
fn within(line: &str, bytes: &Range<usize>, start: usize) -> Range<usize> {
    let characters = |at: usize| {
        let at = at.saturating_sub(start).min(line.len());
        line.char_indices()
            .take_while(|(byte, _)| *byte < at)
            .count()
    };
    characters(bytes.start)..characters(bytes.end).max(characters(bytes.start))
}

impl SourceCode for Excerpt {
    fn read_span<'a>(
        &'a self,
        span: &SourceSpan,
        before: usize,
        after: usize,
    ) -> Result<Box<dyn SpanContents<'a> + 'a>, MietteError> {
        let contents = self.text.read_span(span, before, after)?;
        let column = self
            .columns
            .iter()
            .find(|(at, _)| *at == span.offset() && before == 0)
            .map_or(contents.column(), |(_, column)| *column);
        let (line, lines) = (contents.line(), contents.line_count());
        Ok(Box::new(MietteSpanContents::new_named(
            self.name.clone(),
            contents.data(),
            *contents.span(),
            line,
            column,
            lines,
        )))
    }
}

#[cfg(test)]
mod tests;
