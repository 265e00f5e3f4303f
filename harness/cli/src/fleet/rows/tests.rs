use std::{fs, io};

use super::*;
use crate::{journal::usable, terminal};

fn table(shard: Option<Shard>, files: &[&str]) -> Table {
    let row = |&file: &&str| Row {
        file: file.to_owned(),
        stamp: "10 1".to_owned(),
        ..Row::default()
    };
    Table {
        shard,
        paths: vec!["jobs".to_owned()],
        memory: Some(Bytes(1 << 30)),
        made_with: "0.1.0".to_owned(),
        found: BTreeMap::new(),
        rows: files.iter().map(row).collect(),
    }
}

fn shard(index: u32, count: u32) -> Option<Shard> {
    Some(Shard { index, count })
}

/// Writes the tables into folders of their own, and merges them.
fn merge(tables: &[Table]) -> Result<Table, String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let folders: Vec<PathBuf> = (0..tables.len())
        .map(|number| folder.path().join(number.to_string()))
        .collect();
    for (folder, table) in folders.iter().zip(tables) {
        terminal::save(
            &path(folder),
            table.document().map_err(|error| error.to_string())?,
        )
        .map_err(|error| error.to_string())?;
    }
    merged(&folders, &folder.path().join("out")).map_err(|error| error.to_string())
}

#[test]
fn a_merge_has_the_rows_of_all_shards_and_an_empty_shard_is_one() {
    let all = merge(&[
        table(shard(3, 3), &["b"]),
        table(shard(1, 3), &["c", "a"]),
        table(shard(2, 3), &[]),
    ]);
    assert_eq!(all, Ok(table(None, &["a", "b", "c"])));
    assert_eq!(
        merge(&[table(None, &["a", "b"]), table(None, &["b", "c"])]),
        all,
        "whole runs may share files"
    );
}

#[test]
fn shards_of_other_runs_and_missing_or_repeated_shards_are_refused() {
    let [first, second] = [table(shard(1, 2), &["a", "b"]), table(shard(2, 2), &["c"])];
    let other = |change: fn(&mut Table)| {
        let mut other = second.clone();
        change(&mut other);
        other
    };
    // As if shard 1 of 2 had found these snapshots, and shard 2 always the same.
    let finding = |table: &Table, names: &[&str]| {
        let [of_first, of_second] = [names, &["c"]]
            .map(|names| Found::by_shard(names.iter().copied(), shard(1, 1))[&1].clone());
        Table {
            found: BTreeMap::from([(1, of_first), (2, of_second)]),
            ..table.clone()
        }
    };
    for (tables, why) in [
        (vec![first.clone()], "missing: shard 2/2"),
        (
            vec![first.clone(), first.clone(), second.clone()],
            "shard 1/2 appears twice",
        ),
        (
            vec![first.clone(), table(shard(2, 3), &[])],
            "shards 1/2 and 2/3 differ in their number",
        ),
        (
            vec![first.clone(), table(None, &["c"])],
            "some folders are shards, and others are whole",
        ),
        (
            vec![
                first.clone(),
                other(|table| table.paths = vec!["/mnt/jobs".to_owned()]),
            ],
            "searched different paths: jobs; and /mnt/jobs",
        ),
        (
            vec![
                first.clone(),
                other(|table| table.made_with = "0.2.0".to_owned()),
            ],
            "different versions or options made the rows: 0.1.0; and 0.2.0",
        ),
        (
            vec![finding(&first, &["a", "b"]), finding(&second, &["a", "n"])],
            "the rows of shard 1/2 are old: another shard found others there",
        ),
        (
            vec![finding(&first, &["a"]), finding(&second, &["a", "b"])],
            "the rows of shard 1/2 are old",
        ),
    ] {
        let error = merge(&tables).expect_err(why);
        assert!(error.contains(why), "{error}");
    }
    assert!(
        merge(&[finding(&first, &["a", "b"]), finding(&second, &["a"])]).is_ok(),
        "a snapshot that appeared in between has its row"
    );
    let mut changed = table(None, &["a"]);
    changed.rows[0].stamp = "11 2".to_owned();
    assert_eq!(
        merge(&[table(None, &["a"]), changed]),
        Err("two rows of a differ".to_owned())
    );
}

#[test]
fn a_shard_with_any_changed_missing_or_additional_byte_is_refused() -> io::Result<()> {
    let whole = table(None, &["ä.pickle", "b.pickle"]);
    let text = whole
        .document()
        .expect("rows have a JSON form")
        .into_bytes();
    let parse = |bytes: &[u8]| Table::parse(Path::new("rows.jsonl"), bytes);
    assert_eq!(parse(&text).ok(), Some(whole.clone()));
    // The last line end alone may be missing.
    for at in 0..text.len() - 1 {
        let mut flipped = text.clone();
        flipped[at] ^= 1;
        let without = [&text[..at], &text[at + 1..]].concat();
        for (changed, how) in [
            (&text[..at], "cut at"),
            (&without, "without"),
            (&flipped, "with another"),
        ] {
            assert!(parse(changed).is_err(), "{how} byte {at}");
        }
    }
    let first = text
        .split_inclusive(|&byte| byte == b'\n')
        .next()
        .unwrap_or_default();
    for added in [first, b"{}\n"] {
        assert!(
            parse(&[&text, added].concat()).is_err() && parse(&[added, &text].concat()).is_err(),
            "{}",
            String::from_utf8_lossy(added)
        );
    }
    let folder = tempfile::tempdir()?;
    let file = path(folder.path());
    // A cut within a character costs the rows after it.
    fs::write(
        &file,
        &text[..text
            .iter()
            .position(|&byte| byte == 0xc3)
            .map_or(0, |at| at + 1)],
    )?;
    assert_eq!(usable::<Row>(&file).ok(), Some(Vec::new()));
    let second = text.split(|&byte| byte == b'\n').nth(1).unwrap_or_default();
    fs::write(&file, [b"{\"file\": \"\xc3\n", second].concat())?;
    assert_eq!(usable(&file).ok(), Some(vec![whole.rows[1].clone()]));
    Ok(())
}
