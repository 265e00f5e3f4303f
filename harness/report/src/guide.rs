//! Chapters of the guide for a terminal: [`chapter`].
//!
//! It reads the markdown of this project: paragraphs, lists, fenced code, tables, links and
//! comments.

use anstyle::Style as Paint;

use super::terminal::{Style, Text, fits};
use super::words::Grid;

const HEADING: Paint = Paint::new().bold();

/// Indentation of code, so that a reader sees its end.
const CODE: &str = "    ";

/// The lines of a paragraph, of a table or of code.
enum Part {
    Heading(String),
    Code(Vec<String>),
    Table(Vec<Vec<String>>),
    /// A paragraph or an item of a list, with the indentation of its further lines.
    Text(String, usize),
}

/// Renders a chapter. `topic` maps the file name of another chapter, as in `fleet.md`, to the text
/// that refers to it.
pub fn chapter(
    markdown: &str,
    topic: impl Fn(&str) -> Option<String>,
    style: Style,
    width: Option<usize>,
) -> String {
    let mut out = Text::new(style, width);
    let mut was_item = false;
    for part in parts(markdown) {
        let is_item = matches!(part, Part::Text(_, 1..));
        let is_next_item = is_item && was_item;
        if !(out.text.is_empty() || is_next_item) {
            out.line("");
        }
        was_item = is_item;
        match part {
            Part::Heading(text) => out.painted(&inline(&text, &topic), HEADING, 0),
            Part::Code(lines) => lines
                .iter()
                .for_each(|line| out.line(format!("{CODE}{line}").trim_end())),
            Part::Table(rows) => table(&mut out, rows, &topic, width),
            Part::Text(text, indent) => out.wrapped(&inline(&text, &topic), indent),
        }
    }
    out.text
}

fn parts(markdown: &str) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    let mut lines = markdown.lines().peekable();
    let mut is_open = false;
    while let Some(line) = lines.next() {
        let text = line.trim_start();
        if text.starts_with("<!--") {
            continue;
        }
        let continues = is_open && !text.is_empty();
        is_open = false;
        if text.starts_with("```") {
            let indent = line.len() - text.len();
            let code = lines.by_ref().take_while(|line| line.trim() != "```");
            let code = code.map(|line| line.get(indent..).unwrap_or_default().to_owned());
            parts.push(Part::Code(code.collect()));
        } else if line.starts_with('#') {
            parts.push(Part::Heading(
                line.trim_start_matches(['#', ' ']).to_owned(),
            ));
        } else if text.starts_with('|') {
            let mut rows = vec![cells(text)];
            while let Some(row) = lines.next_if(|line| line.trim_start().starts_with('|')) {
                rows.push(cells(row.trim()));
            }
            parts.push(Part::Table(rows));
        } else if let Some(indent) = item(line) {
            parts.push(Part::Text(line.to_owned(), indent));
            is_open = true;
        } else if let (true, Some(Part::Text(before, _))) = (continues, parts.last_mut()) {
            before.push(' ');
            before.push_str(text);
            is_open = true;
        } else if !text.is_empty() {
            parts.push(Part::Text(line.to_owned(), line.len() - text.len()));
            is_open = true;
        }
    }
    parts
}

/// The indentation of the text of a list's item.
fn item(line: &str) -> Option<usize> {
    let text = line.trim_start();
    let digits = text.trim_start_matches(|character: char| character.is_ascii_digit());
    let marked = if digits.len() < text.len() {
        digits.strip_prefix(". ")
    } else {
        text.strip_prefix("- ")
    };
    Some(line.len() - marked?.len())
}

/// The cells of a table's row. A cell may contain `\|`.
fn cells(row: &str) -> Vec<String> {
    let row = row.trim().trim_start_matches('|').trim_end_matches('|');
    let row = row.replace("\\|", "\u{0}");
    row.split('|')
        .map(|cell| cell.trim().replace('\u{0}', "|"))
        .collect()
}

/// A table with columns if it fits. Otherwise each row is a paragraph for each of its cells.
fn table(
    out: &mut Text,
    rows: Vec<Vec<String>>,
    topic: &impl Fn(&str) -> Option<String>,
    width: Option<usize>,
) {
    let shown =
        |row: Vec<String>| -> Vec<String> { row.iter().map(|cell| inline(cell, topic)).collect() };
    let mut rows = rows.into_iter();
    let heads = shown(rows.next().unwrap_or_default());
    let aligns: String = rows
        .next()
        .unwrap_or_default()
        .iter()
        .map(|rule| if rule.ends_with(':') { 'r' } else { 'l' })
        .collect();
    let rows: Vec<Vec<String>> = rows
        .map(|row| {
            let mut row = shown(row);
            row.resize(heads.len(), String::new());
            row
        })
        .collect();
    let grid = Grid::new(&aligns, heads.iter().cloned(), rows.iter().cloned());
    if fits(&grid, width) {
        out.table(&grid, heads.len(), None);
        return;
    }
    for row in rows {
        let mut cells = heads.iter().zip(&row);
        if let Some((_, first)) = cells.next() {
            out.wrapped(first, 2);
        }
        for (head, cell) in cells.filter(|(_, cell)| !cell.is_empty()) {
            let name = if heads.len() > 2 && !head.is_empty() {
                format!("{head}: ")
            } else {
                String::new()
            };
            out.wrapped(&format!("    {name}{cell}"), 4);
        }
    }
}

/// Replaces links by their text and place, and removes the marks of bold text.
fn inline(text: &str, topic: &impl Fn(&str) -> Option<String>) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some((before, name, target, after)) = link(rest) {
        let file = target.split('#').next().unwrap_or_default();
        let place = if target.contains("://") {
            Some(target.to_owned())
        } else {
            topic(file)
        };
        out += before;
        out += name;
        out.extend(place.map(|place| format!(" ({place})")));
        rest = after;
    }
    out += rest;
    out.replace("**", "")
        .replace("&lt;", "<")
        .replace("&gt;", ">")
}

/// The first link: the text before it, its name, its target, and the text after it.
fn link(text: &str) -> Option<(&str, &str, &str, &str)> {
    let middle = text.find("](")?;
    let begin = text[..middle].rfind('[')?;
    let (target, after) = text[middle + 2..].split_once(')')?;
    Some((&text[..begin], &text[begin + 1..middle], target, after))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(markdown: &str, width: usize) -> String {
        let topic = |file: &str| (file == "fleet.md").then(|| "harness help jobs".to_owned());
        chapter(markdown, topic, Style::Plain, Some(width))
    }

    #[test]
    fn paragraphs_and_lists_are_wrapped_and_code_stays_as_written() {
        let markdown = "# Title\n\n<!-- output: x -->\nOne **two** three\nfour.\n\n\
                        - a b c d e f g\n  \
                        h\n- i\n\n```text\na  b   c d e f g h i j k l\n```\nend\n";
        assert_eq!(
            shown(markdown, 16),
            "Title\n\nOne two three\nfour.\n\n- a b c d e f g\n  h\n- i\n\n    \
             a  b   c d e f g h i j k l\n\nend\n"
        );
    }

    #[test]
    fn links_name_the_topic_or_the_address() {
        let markdown = "See [jobs](fleet.md#a), [x](https://a.b/c) and [y](../y.py).";
        assert_eq!(
            shown(markdown, 90),
            "See jobs (harness help jobs), x (https://a.b/c) and y.\n"
        );
    }

    #[test]
    fn a_table_that_does_not_fit_has_a_paragraph_per_cell() {
        let markdown =
            "| name | n | what |\n|---|---:|---|\n| a\\|b | 1 | long text |\n| c | 22 | |\n";
        assert_eq!(
            shown(markdown, 40),
            "name   n  what\na|b    1  long text\nc     22\n"
        );
        assert_eq!(
            shown(markdown, 18),
            "a|b\n    n: 1\n    what: long\n    text\nc\n    n: 22\n"
        );
    }
}
