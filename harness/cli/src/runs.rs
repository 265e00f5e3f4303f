//! `harness report` for the folders of `harness run`.

use std::path::Path;

use harness_report::{runs, store};

use super::error::{CliError, Failures};
use super::exit::Exit;
use super::{Format, terminal};

/// Renders the report of a run from its records. For a killed run it contains the finished steps.
pub(super) fn render(path: &Path) -> Result<(), CliError> {
    let folder = if path.is_dir() { path } else { path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new(".")) };
    store::render_again(folder)?;
    terminal::print(&format!("report: {}\n", folder.join(store::REPORT).display()))
}

/// Compares two runs; the exit code is 1 if a configuration fails that passed before.
pub(super) fn compare(base: &Path, new: &Path, format: Format) -> Result<Exit, Failures> {
    let (base, new) = match (store::read(base), store::read(new)) {
        (Ok(base), Ok(new)) => (base, new),
        (base, new) => return Err(Failures([base.err(), new.err()].into_iter().flatten().map(CliError::from).collect())),
    };
    let compared = runs::compare(&base, &new);
    match format {
        Format::Text => terminal::print(&compared.text)?,
        Format::Json => terminal::print_json(&compared)?,
    }
    Ok(if compared.is_worse { Exit::Failed } else { Exit::Passed })
}
