use std::collections::BTreeMap;

use harness_explain::fleet::Analysis;

use super::*;
use crate::terminal::Style;

fn row(file: &str, job: &str, cures: &[&str]) -> Row {
    let analysis = Analysis {
        outcome: FleetOutcome::OutOfMemory,
        cause: Some("inactive_split".to_owned()),
        cause_bytes: 1 << 30,
        top_site: Some("model.py:41 forward".to_owned()),
        category: Some("program".to_owned()),
        faithful: Some(true),
        cures: cures.iter().map(|&cure| cure.to_owned()).collect(),
        ..Analysis::default()
    };
    Row {
        file: file.to_owned(),
        job: job.to_owned(),
        analysis,
        ..Row::default()
    }
}

fn rows() -> Vec<Row> {
    let expandable = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True";
    let both = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:128";
    let mut rows = vec![
        row(
            "a-rank0.pickle",
            "a",
            &[
                both,
                expandable,
                "torch.cuda.empty_cache() before model.py:41 forward",
            ],
        ),
        row("a-rank1.pickle", "a", &[both, expandable]),
        row("b.pickle", "b", &[]),
        row("c.pickle", "c", &[]),
        row("<d>.pickle", "d", &[]),
    ];
    (rows[2].analysis.cause, rows[2].analysis.cause_bytes) =
        (Some("too_large".to_owned()), 5 << 30);
    let unfaithful = "the replay differs: recorded 2 MiB mapped, replayed no driver call";
    (rows[3].analysis.faithful, rows[3].analysis.problem) =
        (Some(false), Some(unfaithful.to_owned()));
    rows[4].analysis = Analysis::unreadable("the file ends at byte 17");
    rows.push(Row {
        analysis: Analysis::unreadable("the file ends at byte 2311"),
        ..rows[4].clone()
    });
    rows
}

#[test]
fn causes_changes_and_problems_are_counted_by_jobs_and_ranks() {
    insta::assert_snapshot!(render(&FleetSummary::of(&rows()), Style::Plain, None));
}

fn page(rows: &[Row]) -> String {
    html::page(rows, &FleetSummary::of(rows), &BTreeMap::new())
}

#[test]
fn the_page_has_the_tables_and_escapes_names() {
    let page = page(&[row("<script>.pickle", "a", &[])]);
    assert!(
        page.contains(">&lt;script&gt;.pickle</td>") && !page.contains("<script"),
        "{page}"
    );
    assert!(
        page.contains("Causes of out-of-memory errors")
            && page.contains("model.py:41 forward (1 of 1)"),
        "{page}"
    );
}

#[test]
fn a_long_path_is_shortened_in_its_cell_and_whole_in_its_title() {
    let path = format!("{}/\"{}\".pickle", "<a>".repeat(900), "b".repeat(900));
    let mut rows = [row(&path, "a", &[]), row(&path, &path, &[])];
    rows[1].analysis = Analysis::unreadable("the file ends at byte 17");
    let page = page(&rows);
    let cells = page.split("<td").skip(1);
    let cells = cells.map(|cell| cell.split_once("</td>").expect("a cell ends").0);
    let long: Vec<&str> = cells.filter(|cell| cell.contains(".pickle")).collect();
    assert_eq!(long.len(), 2, "{page}");
    for cell in long {
        let whole = "&lt;a&gt;".repeat(900) + "/&quot;" + &"b".repeat(900) + "&quot;.pickle";
        let (begin, short) = cell.rsplit_once("\">").expect("it has a title");
        assert!(begin.ends_with(&format!("<span title=\"{whole}")), "{cell}");
        assert!(short.ends_with("b\".pickle</span>"), "{cell}");
        let shown = short.replace("&lt;", "<").replace("&gt;", ">");
        assert_eq!(shown.chars().count(), 160 + "</span>".len(), "{cell}");
    }
}

#[test]
fn the_page_sorts_errors_by_cause_and_bytes() {
    let mut rows = rows();
    rows[1].analysis.cause_bytes = 2 << 30;
    let page = page(&rows);
    let places = ["a-rank1.pickle", "a-rank0.pickle", "b.pickle"]
        .map(|file| page.find(&format!(">{file}</td>")).expect("it is a row"));
    assert!(places.is_sorted(), "{page}");
}

#[test]
fn the_page_has_the_peaks_of_all_jobs_and_links_their_pages() {
    let mut rows = rows();
    (
        rows[1].analysis.peak_allocated,
        rows[1].analysis.peak_reserved,
    ) = (3 << 30, 4 << 30);
    for row in &mut rows[..2] {
        row.analysis.events = 9;
    }
    // Without events, the peak is unknown.
    (rows[2].analysis.outcome, rows[2].analysis.peak_reserved) = (FleetOutcome::Ended, 5 << 30);
    let with_links = html::page(
        &rows,
        &FleetSummary::of(&rows),
        &BTreeMap::from([("a".to_owned(), "pages/a-1.html".to_owned())]),
    );
    let peaks = with_links
        .split("<h2>")
        .find(|part| part.starts_with("Peaks of all jobs"))
        .expect("the table is there");
    let cells = |text: &str| {
        text.split("<td")
            .skip(1)
            .map(|cell| cell.split_once('>').map_or("", |(_, cell)| cell).to_owned())
            .collect::<Vec<_>>()
    };
    let of_rows: Vec<Vec<String>> = peaks.split("<tr>").skip(2).map(cells).collect();
    let of_row = |index: usize| {
        of_rows[index]
            .iter()
            .map(|cell| cell.split("</td>").next().unwrap_or_default())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        of_rows.len(),
        3,
        "a job without a readable snapshot has no peak: {peaks}"
    );
    assert_eq!(
        of_row(0)[..5],
        ["b", "1", "–", "at least 0 B", "at least 5 GiB"]
    );
    assert_eq!(
        of_row(1)[..5],
        [
            "<a href=\"pages/a-1.html\">a</a>",
            "2",
            "2",
            "3 GiB",
            "4 GiB"
        ]
    );
    assert_eq!(
        with_links.matches("pages/a-1.html").count(),
        3,
        "the row of the job, and two errors"
    );
    assert!(!with_links.contains("--pages") && page(&rows).contains("--pages"));
}

#[cfg(feature = "parquet")]
#[test]
fn the_parquet_file_has_a_row_per_snapshot_with_its_fields() {
    use ::parquet::file::reader::{FileReader as _, SerializedFileReader};
    let mut file = tempfile::tempfile().expect("there is space");
    std::io::Write::write_all(&mut file, &parquet::file(&rows()).expect("rows fit"))
        .expect("there is space");
    let reader = SerializedFileReader::new(file).expect("it is Parquet");
    let schema = reader.metadata().file_metadata().schema_descr();
    let cures = schema.column(schema.num_columns() - 1);
    assert_eq!(
        cures.path().string(),
        "cures.list.element",
        "a list without this group is not read by all"
    );
    let read: Vec<String> = reader
        .get_row_iter(None)
        .expect("it has rows")
        .map(|row| row.expect("it is whole").to_string())
        .collect();
    assert_eq!(read.len(), 6);
    assert!(
        read[0].contains("file: \"a-rank0.pickle\", job: \"a\", rank: null"),
        "{}",
        read[0]
    );
    assert!(
        read[0].contains("cause_bytes: 1073741824") && read[0].contains("faithful: true"),
        "{}",
        read[0]
    );
    let cures = "cures: [\
         \"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:128\", \
         \"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\"]";
    assert!(read[1].contains(cures), "{}", read[1]);
    assert!(
        read[2].contains("cures: []")
            && read[5].contains("problem: \"the file ends at byte 2311\""),
        "{} {}",
        read[2],
        read[5]
    );
}

#[test]
fn without_rows_there_are_no_tables() {
    assert_eq!(
        render(&FleetSummary::of(&[]), Style::Plain, None).trim(),
        "0 snapshots of 0 jobs: 0 end with an out-of-memory error, 0 do not."
    );
}
