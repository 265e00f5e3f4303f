use std::{collections::BTreeSet, fmt::Write as _};

use super::escape::{fenced, prose};
use super::unique;
use super::words::{Align, Grid};

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Page {
    pub(super) text: String,
    /// Pictures by file name, in the order of appearance.
    pub(super) pictures: Vec<(String, String)>,
    /// File names in use, without extensions.
    pub(super) names: BTreeSet<String>,
}

impl Page {
    pub(super) fn block(&mut self, block: impl AsRef<str>) {
        let block = block.as_ref().trim_end();
        if !block.is_empty() {
            self.text.push_str(block);
            self.text.push_str("\n\n");
        }
    }

    pub(super) fn anchor(&mut self, name: &str) {
        let _ = writeln!(self.text, "<a id=\"{name}\"></a>\n");
    }

    /// Adds collapsed content below a summary, which is Markdown.
    pub(super) fn fold(&mut self, summary: &str, content: impl FnOnce(&mut Self)) {
        self.block(format!("<details><summary>{summary}</summary>"));
        content(self);
        self.block("</details>");
    }

    pub(super) fn grid(&mut self, grid: &Grid) {
        let columns = grid
            .columns
            .iter()
            .map(|(head, align)| (prose(head), *align))
            .collect();
        let rows = grid
            .rows
            .iter()
            .map(|row| row.iter().map(|cell| prose(cell)).collect())
            .collect();
        self.table(&Grid { columns, rows });
    }

    /// Adds a table whose heads and cells are Markdown.
    pub(super) fn table(&mut self, grid: &Grid) {
        let (heads, aligns): (Vec<&str>, Vec<Align>) = grid
            .columns
            .iter()
            .map(|(head, align)| (head.as_str(), *align))
            .unzip();
        self.row(&heads);
        self.row(
            &aligns
                .into_iter()
                .map(|align| if align == Align::Left { "---" } else { "---:" })
                .collect::<Vec<_>>(),
        );
        grid.rows.iter().for_each(|row| self.row(row));
        self.text.push('\n');
    }

    /// Adds a picture below a name that no other picture of the page has. Returns the name of its
    /// file.
    pub(super) fn picture(&mut self, name: &str, svg: String) -> String {
        let file = format!("{}.svg", unique(name, "-", &mut self.names));
        self.pictures.push((file.clone(), svg));
        file
    }

    /// All files of the page: the pictures, then the text with this name.
    pub(super) fn files(self, name: &str) -> Vec<(String, String)> {
        self.pictures
            .into_iter()
            .chain([(name.to_owned(), self.text)])
            .collect()
    }

    fn row<S: AsRef<str>>(&mut self, cells: &[S]) {
        cells
            .iter()
            .for_each(|cell| self.text.extend(["| ", cell.as_ref(), " "]));
        self.text.push_str("|\n");
    }

    pub(super) fn list(&mut self, lines: impl IntoIterator<Item = String>) {
        self.block(
            lines
                .into_iter()
                .map(|line| format!("- {line}\n"))
                .collect::<String>(),
        );
    }

    pub(super) fn command(&mut self, command: &str) {
        self.block(fenced("sh", command));
    }

    pub(super) fn ended(mut self) -> Self {
        self.text.truncate(self.text.trim_end().len());
        self.text.push('\n');
        self
    }
}
