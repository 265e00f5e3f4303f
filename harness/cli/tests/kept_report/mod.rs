//! A report that is kept in the project: its text and pictures, without the records that it was made of.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Fails unless the report that was made is the one that is kept, byte for byte. With UPDATE in the environment the made one is kept first.
pub(crate) fn compare(made: &Path, kept: &Path) {
    let made = files(made);
    if std::env::var_os("UPDATE").is_some() {
        drop(fs::remove_dir_all(kept));
        fs::create_dir_all(kept).unwrap();
        made.iter().for_each(|(name, content)| fs::write(kept.join(name), content).unwrap());
    }
    let (folder, kept) = (kept.display(), files(kept));
    assert_eq!(made.keys().collect::<Vec<_>>(), kept.keys().collect::<Vec<_>>(), "other files in {folder}: run with UPDATE=1");
    for (name, content) in &made {
        assert!(kept[name] == *content, "{folder}/{name} is not what this build makes: run with UPDATE=1 and look at the difference");
    }
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let shown = paths.filter(|path| path.extension().is_some_and(|ending| ending == "md" || ending == "svg"));
    shown.map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap())).collect()
}
