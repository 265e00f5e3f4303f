//! The rows of a matrix as a Parquet file, with the names that they have in JSON.

use harness_exec::doubts::Doubt;
use harness_exec::matrix::{MatrixRow, ROW_VERSION};
use parquet::errors::Result;

use crate::parquet::{Column, Table};

const COLUMNS: [(&str, Column<MatrixRow>); 13] = [
    ("program", Column::Text(|row| Some(&row.cell.program))),
    ("values", Column::Map(|row| &row.cell.values)),
    ("run", Column::Text(|row| Some(&row.run))),
    (
        "exit_code",
        Column::Number(|row| row.figures.exit_code.map(u64::from)),
    ),
    (
        "failure",
        Column::Text(|row| row.figures.failure.as_deref()),
    ),
    (
        "peak_allocated",
        Column::Number(|row| row.figures.peak_allocated),
    ),
    (
        "peak_reserved",
        Column::Number(|row| row.figures.peak_reserved),
    ),
    ("num_ooms", Column::Number(|row| row.figures.num_ooms)),
    (
        "num_alloc_retries",
        Column::Number(|row| row.figures.num_alloc_retries),
    ),
    ("took_ms", Column::Number(|row| row.figures.took_ms)),
    ("torch", Column::Text(|row| Some(&row.figures.torch))),
    (
        "with_cpu_values",
        Column::Flag(|row| Some(row.figures.with_cpu_values)),
    ),
    // Only their kinds.
    (
        "doubts",
        Column::Texts(|row| row.figures.doubts.iter().map(kind).collect()),
    ),
];

pub fn file(rows: &[MatrixRow]) -> Result<Vec<u8>> {
    let table = Table {
        name: "matrix",
        version: ROW_VERSION,
        columns: &COLUMNS,
    };
    table.file(rows)
}

const fn kind(doubt: &Doubt) -> &'static str {
    match doubt {
        Doubt::UncomputedReads { .. } => "uncomputed_reads",
        Doubt::Timing { .. } => "timing",
        Doubt::GraphMemory { .. } => "graph_memory",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Write as _;

    use ::parquet::file::reader::{FileReader as _, SerializedFileReader};
    use harness_exec::matrix::{MatrixCell, RunFigures};

    use super::*;

    fn row(values: &[(&str, &str)], doubts: Vec<Doubt>) -> MatrixRow {
        let values = values
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        MatrixRow {
            version: ROW_VERSION,
            cell: MatrixCell {
                program: "train".to_owned(),
                values: values.collect(),
            },
            figures: RunFigures {
                peak_reserved: Some(3 << 40),
                doubts,
                ..RunFigures::default()
            },
            ..MatrixRow::default()
        }
    }

    /// Writes rows and reads them back, as a line of text each.
    fn read(rows: &[MatrixRow]) -> Vec<String> {
        let mut written = tempfile::tempfile().unwrap();
        written.write_all(&file(rows).unwrap()).unwrap();
        let reader = SerializedFileReader::new(written).unwrap();
        let rows = reader.get_row_iter(None).unwrap();
        rows.map(|row| row.unwrap().to_string()).collect()
    }

    #[test]
    fn columns_are_the_fields_of_json_and_doubts_are_their_kinds() {
        let doubts = vec![
            Doubt::UncomputedReads {
                reads: 1,
                at: Vec::new(),
                has_torch: true,
            },
            Doubt::Timing {
                waits: 2,
                at: Vec::new(),
            },
            Doubt::GraphMemory { requests: 3 },
        ];
        let kinds = serde_json::to_value(&doubts).unwrap();
        let kinds = kinds
            .as_array()
            .unwrap()
            .iter()
            .map(|doubt| doubt["kind"].to_string());
        let kinds = kinds.collect::<Vec<_>>().join(", ");
        let rows = [
            row(&[("batch", "8"), ("gpu-of_2", "h200")], doubts),
            row(&[], Vec::new()),
        ];
        let fields = serde_json::to_value(&rows[0]).unwrap();
        let mut fields: Vec<&str> = fields
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        fields.retain(|name| *name != "version");
        let mut columns = COLUMNS.map(|(name, _)| name);
        fields.sort_unstable();
        columns.sort_unstable();
        assert_eq!(columns[..], fields);
        let read = read(&rows);
        for (read, values, kinds) in [
            (
                &read[0],
                "{batch: \"8\", gpu-of_2: \"h200\"}",
                kinds.as_str(),
            ),
            (&read[1], "{batch: null, gpu-of_2: null}", ""),
        ] {
            let first =
                format!("{{program: \"train\", values: {values}, run: \"\", exit_code: null");
            assert!(read.starts_with(&first), "{read}");
            assert!(read.contains("peak_reserved: 3298534883328, "), "{read}");
            assert!(read.ends_with(&format!("doubts: [{kinds}]}}")), "{read}");
        }
    }

    #[test]
    fn rows_without_values_have_no_column_of_them() {
        let read = read(&[row(&[], Vec::new())]);
        assert!(
            read[0].starts_with("{program: \"train\", run: \"\""),
            "{}",
            read[0]
        );
    }
}
