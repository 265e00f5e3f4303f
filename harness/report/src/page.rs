//! Builds a Markdown page with its pictures.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::escape::{fenced, prose};
use super::picture::Picture;
use super::words::{Align, Grid};

#[derive(Default)]
pub(super) struct Page {
    /// The Markdown so far.
    pub(super) text: String,
    /// Pictures, in the order of appearance.
    pub(super) pictures: Vec<Picture>,
    /// File names in use, without extensions.
    pub(super) names: BTreeSet<String>,
}

impl Page {
    /// Adds a block, for example a paragraph.
    pub(super) fn block(&mut self, block: impl AsRef<str>) {
        let block = block.as_ref().trim_end();
        if !block.is_empty() {
            self.text.push_str(block);
            self.text.push_str("\n\n");
        }
    }

    /// Adds a link target.
    pub(super) fn anchor(&mut self, name: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "<a id=\"{name}\"></a>\n");
    }

    /// Adds collapsed content below a summary, which is Markdown.
    pub(super) fn fold(&mut self, summary: &str, content: impl FnOnce(&mut Self)) {
        self.block(format!("<details><summary>{summary}</summary>"));
        content(self);
        self.block("</details>");
    }

    /// Adds a table of plain text.
    pub(super) fn grid(&mut self, grid: &Grid) {
        let columns: Vec<(String, Align)> = grid.columns.iter().map(|(head, align)| (prose(head), *align)).collect();
        let rows = grid.rows.iter().map(|row| row.iter().map(|cell| prose(cell)).collect());
        self.table(&columns, rows);
    }

    /// Adds a table of Markdown cells.
    pub(super) fn table(&mut self, columns: &[(String, Align)], rows: impl IntoIterator<Item = Vec<String>>) {
        let heads: Vec<&str> = columns.iter().map(|(head, _)| head.as_str()).collect();
        let rules: Vec<&str> = columns.iter().map(|(_, align)| if *align == Align::Left { "---" } else { "---:" }).collect();
        self.row(&heads);
        self.row(&rules);
        for row in rows {
            self.row(&row);
        }
        self.text.push('\n');
    }

    fn row<S: AsRef<str>>(&mut self, cells: &[S]) {
        for cell in cells {
            self.text.push_str("| ");
            self.text.push_str(cell.as_ref());
            self.text.push(' ');
        }
        self.text.push_str("|\n");
    }

    /// Adds a list of Markdown lines.
    pub(super) fn list(&mut self, lines: &[String]) {
        if !lines.is_empty() {
            self.block(lines.iter().map(|line| format!("- {line}\n")).collect::<String>());
        }
    }

    /// Adds a shell command.
    pub(super) fn command(&mut self, command: &str) {
        self.block(fenced("sh", command));
    }

    /// Ends the page with one line feed.
    pub(super) fn end(&mut self) {
        self.text.truncate(self.text.trim_end().len());
        self.text.push('\n');
    }
}
