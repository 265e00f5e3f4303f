//! Tables of steps, and the notes below them.

use harness_record::{RunRecord, StepRecord, Table};

use super::UNFOLDED;
use crate::escape::{code, prose};
use crate::words::{self, Grid};
use crate::{page::Page, steps::Selection};

impl Page {
    pub(super) fn steps(&mut self, selection: &Selection<'_>) {
        if selection.left_out() > 0 {
            self.block(
                "Long run: the table has the first and last steps, and steps with events between \
                 them. `records.json` has all of them.",
            );
        }
        self.grid(&selection.grid());
        self.unrecorded(selection.run);
        self.list(
            selection
                .steps()
                .flat_map(|step| notes(step, &[]).into_iter().chain(counted(step))),
        );
        self.step_tables(selection, UNFOLDED);
    }

    pub(super) fn unrecorded(&mut self, run: &RunRecord) {
        words::unrecorded(run)
            .iter()
            .for_each(|text| self.block(text));
    }

    pub(super) fn step_tables(&mut self, selection: &Selection<'_>, unfolded: usize) {
        for (step, table) in selection
            .steps()
            .flat_map(|step| step.tables.iter().map(move |table| (step, table)))
        {
            self.step_table(step, table, unfolded);
        }
    }

    fn step_table(&mut self, step: &StepRecord, table: &Table, unfolded: usize) {
        let title = format!("Step {}: {}", step.number, prose(&table.title));
        let grid = Grid::new("l", &table.columns, table.rows.clone());
        if table.rows.len() > unfolded {
            self.fold(&title, |page| page.grid(&grid));
        } else {
            self.block(title);
            self.grid(&grid);
        }
    }
}

pub(super) fn notes(step: &StepRecord, shown_above: &[&str]) -> Vec<String> {
    let new = step
        .notes
        .iter()
        .filter(|note| !shown_above.contains(&note.as_str()));
    new.map(|note| format!("Step {}: {}", step.number, prose(note)))
        .collect()
}

pub(super) fn counted(step: &StepRecord) -> Option<String> {
    let figures: Vec<String> = step
        .reports
        .iter()
        .map(|(name, &value)| format!("{} = {}", code(name), prose(&words::metric(name, value))))
        .collect();
    (!figures.is_empty()).then(|| format!("Step {} counted: {}", step.number, figures.join(", ")))
}
