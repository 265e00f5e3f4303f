//! The file of the rows of a matrix. Its first line has the matrix, so the file proves by itself
//! that no row is missing.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use harness_base::words::joined;
use harness_exec::matrix::{MatrixCell, MatrixReport, MatrixRow, ROW_VERSION};
use harness_exec::trials::identity::Run;
use harness_exec::trials::merge::difference;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::{Job, language};
use crate::error::CliError;
use crate::journal::{self, Journal};
use crate::terminal;

/// Missing rows that an error names.
const NAMED: usize = 5;

/// The first line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Head {
    version: u32,
    /// The text of the matrix.
    matrix: String,
    /// What all shards of the matrix have in common.
    of_all: Run,
}

/// What lines of all versions have.
#[derive(Deserialize)]
struct Line {
    version: u32,
    /// Only the first line has a matrix.
    matrix: Option<IgnoredAny>,
}

impl Line {
    fn read(line: &[u8]) -> Option<Self> {
        serde_json::from_slice(line).ok()
    }
}

pub(super) struct Table {
    head: Head,
    /// Each is of the programs, files and options of the head, or no longer of its matrix.
    pub(super) rows: Vec<MatrixRow>,
}

impl Table {
    pub(super) const fn empty(matrix: String, of_all: Run) -> Self {
        Self {
            head: Head {
                version: ROW_VERSION,
                matrix,
                of_all,
            },
            rows: Vec::new(),
        }
    }

    /// Reads a file. Of two rows of a run, the later one counts. `None` if the file does not exist
    /// or is empty.
    fn read(path: &Path) -> Result<Option<Self>, CliError> {
        let text = journal::bytes(path)?;
        if text.is_empty() {
            return Ok(None);
        }
        let mut lines = text.split(|&byte| byte == b'\n');
        let refusal = |why: &str| CliError::input(format!("{}: {why}", path.display()), HELP);
        let no_rows = || refusal("this is no file of rows of `harness exec --matrix`");
        let is_newer =
            |line: &[u8]| Line::read(line).is_some_and(|line| line.version > ROW_VERSION);
        let first = lines.next().unwrap_or_default();
        if Line::read(first).is_none_or(|line| line.matrix.is_none()) {
            return Err(no_rows());
        }
        if is_newer(first) || lines.clone().any(is_newer) {
            return Err(refusal("a newer harness wrote these rows"));
        }
        let head: Head = serde_json::from_slice(first).map_err(|_| no_rows())?;
        let mut places: HashMap<MatrixCell, usize> = HashMap::new();
        let mut rows: Vec<MatrixRow> = Vec::new();
        for line in lines {
            if let Ok(row) = serde_json::from_slice::<MatrixRow>(line) {
                match places.get(&row.cell) {
                    Some(&at) => rows[at] = row,
                    None => {
                        places.insert(row.cell.clone(), rows.len());
                        rows.push(row);
                    }
                }
            }
        }
        Ok(Some(Self { head, rows }))
    }

    pub(super) fn existing(path: &Path) -> Result<Self, CliError> {
        Self::read(path)?
            .ok_or_else(|| CliError::input(format!("{}: there are no rows", path.display()), HELP))
    }

    /// Takes the rows of an earlier start from the file, and opens it for further rows. A row of a
    /// run that has changed, or that has no exit code, is left out. Also returns the lock of the
    /// earlier file.
    pub(super) fn continued(
        &mut self,
        path: &Path,
        jobs: &[Job],
    ) -> Result<(Journal, Journal), CliError> {
        let earlier = Journal::open(path)?;
        earlier.become_only_writer()?;
        let found = Self::read(path)?;
        let runs: HashMap<&MatrixCell, &str> = jobs
            .iter()
            .map(|job| (&job.planned.cell, job.run.as_str()))
            .collect();
        let is_kept = |row: &MatrixRow| match runs.get(&row.cell) {
            Some(run) => *run == row.run && row.figures.exit_code.is_some(),
            None => true,
        };
        let is_whole = found
            .as_ref()
            .is_some_and(|found| found.head == self.head && found.rows.iter().all(is_kept));
        self.rows = found.map(|found| found.rows).unwrap_or_default();
        self.rows.retain(is_kept);
        if !is_whole {
            self.save(path)?;
        }
        let journal = Journal::open(path)?;
        if !is_whole {
            journal.become_only_writer()?;
        }
        journal.end_torn_line()?;
        Ok((journal, earlier))
    }

    /// Orders the rows as in the matrix. Those that it no longer has follow.
    pub(super) fn sort(&mut self, jobs: &[Job]) {
        let places: HashMap<&MatrixCell, usize> = jobs
            .iter()
            .enumerate()
            .map(|(at, job)| (&job.planned.cell, at))
            .collect();
        let place = |row: &MatrixRow| places.get(&row.cell).copied().unwrap_or(usize::MAX);
        self.rows.sort_by_key(place);
    }

    pub(super) fn save(&self, path: &Path) -> Result<(), CliError> {
        let rows = self.rows.iter().map(journal::line);
        let text: String = [journal::line(&self.head)]
            .into_iter()
            .chain(rows)
            .collect::<Result<_, _>>()?;
        terminal::save(path, text)
    }

    #[cfg(feature = "parquet")]
    fn save_columns(&self, path: &Path) -> Result<(), CliError> {
        let columns = harness_report::trials::matrix::parquet::file(&self.rows);
        let columns = columns.map_err(|error| {
            CliError::internal(error.to_string(), "report this with the file of the rows")
        })?;
        terminal::save(path, columns)
    }

    #[cfg(not(feature = "parquet"))]
    fn save_columns(&self, path: &Path) -> Result<(), CliError> {
        let message = format!("{}: this harness is built without Parquet", path.display());
        let help = crate::error::with_feature("parquet");
        Err(CliError::input(message, help))
    }
}

/// Returns whether the ending of a file's name asks for Parquet.
pub(crate) fn is_parquet(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "parquet")
}

const HELP: &str = "name a file that `harness exec --matrix` wrote";

/// Joins the rows of the shards of a matrix in a file of rows, or in Parquet. Fails if a row is
/// missing, or with `allow_missing` returns which. Returns `None` if no file has such rows.
pub(crate) fn merged(
    paths: &[PathBuf],
    output: &Path,
    allow_missing: bool,
) -> Result<Option<(MatrixReport, Option<String>)>, CliError> {
    let has_rows = |path: &PathBuf| {
        let text = journal::bytes(path).unwrap_or_default();
        let first = text
            .split(|&byte| byte == b'\n')
            .next()
            .and_then(Line::read);
        first.is_some_and(|line| line.matrix.is_some())
    };
    if !paths.iter().any(has_rows) {
        return Ok(None);
    }
    let tables = paths
        .iter()
        .map(|path| Table::existing(path))
        .collect::<Result<Vec<_>, _>>()?;
    let mut all = Table {
        head: common_head(paths, &tables)?,
        rows: Vec::new(),
    };
    let planned = language::parse(&all.head.matrix, &paths[0], |_| None)?;
    let found = by_cell(paths, &tables)?;
    let mut missing = Vec::new();
    for run in &planned {
        match found.get(&run.cell) {
            Some((_, row)) => all.rows.push((*row).clone()),
            None => missing.push(&run.cell),
        }
    }
    let missing = (!missing.is_empty()).then(|| {
        let first = missing.iter().take(NAMED);
        let named = joined(first.map(|cell| format!("`{cell}`")), ", ");
        let more = match missing.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let (missing, all) = (missing.len(), planned.len());
        format!("missing: {missing} of {all} rows: {named}{more}")
    });
    if let Some(missing) = missing.as_ref().filter(|_| !allow_missing) {
        return Err(not_shards(missing.clone()));
    }
    if is_parquet(output) {
        all.save_columns(output)?;
    } else {
        all.save(output)?;
    }
    Ok(Some((MatrixReport::new(all.rows, None), missing)))
}

fn not_shards(message: String) -> CliError {
    CliError::input(
        message,
        "shards come from `harness exec --matrix FILE --shard I/N` with the same FILE, N, EARLIER \
         and programs",
    )
}

/// The head that the tables have in common. Fails if they are of different matrices or programs.
fn common_head(paths: &[PathBuf], tables: &[Table]) -> Result<Head, CliError> {
    let mut head = tables[0].head.clone();
    for (path, table) in paths.iter().zip(tables).skip(1) {
        let [one, other] = [&paths[0], path].map(|path| path.display());
        if table.head.matrix != head.matrix {
            let message = format!("{one} and {other} have different matrices");
            return Err(not_shards(message));
        }
        if let Some((name, [a, b])) = difference(&head.of_all, &table.head.of_all) {
            let message = format!("{one} and {other} differ in {name}: `{a}` and `{b}`");
            return Err(not_shards(message));
        }
        head.of_all.extend(table.head.of_all.clone());
    }
    Ok(head)
}

/// The rows of all tables with their files. Fails if two rows of a run differ.
fn by_cell<'a>(
    paths: &'a [PathBuf],
    tables: &'a [Table],
) -> Result<HashMap<&'a MatrixCell, (&'a Path, &'a MatrixRow)>, CliError> {
    let mut found: HashMap<&MatrixCell, (&Path, &MatrixRow)> = HashMap::new();
    for (path, table) in paths.iter().zip(tables) {
        for row in &table.rows {
            match found.insert(&row.cell, (path, row)) {
                Some((before, other)) if other != row => {
                    let [one, other] = [before, path].map(Path::display);
                    let message = format!("{one} and {other} differ in the row `{}`", row.cell);
                    return Err(not_shards(message));
                }
                _ => {}
            }
        }
    }
    Ok(found)
}
