//! Where nights lie on disk: a folder a night below `nightly`, with the record, the report and its pictures, and beside `nightly` the index
//! of all. How they are rendered is the business of those who call; this module only knows names, files, and which night is whose baseline.
//!
//! Everything may be killed at any point, be done twice, or meet a full disk: a night appears whole or not at all, and the index and thinned
//! records are replaced whole. An index that lacks a night, because the program was killed between the two, is put right by the next.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use harness_allocator::device::Clock;

use super::compare;
use super::record::{BENCH_RECORD_VERSION, EarlierBase, Entry, EntryOutcome, NightRecord, Stopped, SuiteRecord};
use harness_base::files::slug;
use harness_base::files::{self, Document, Folder, StoreError};

/// Where nights and their index go unless the user says otherwise.
pub const DEFAULT_ROOT: &str = "reports";

/// The folder of nights in the root.
pub const NIGHTLY: &str = "nightly";

/// The page of all nights, beside it.
pub const INDEX: &str = "README.md";

/// What a person reads of a night, in its folder.
pub const REPORT: &str = "report.md";

/// The file of a night that everything else is rendered from.
pub const NIGHT: &str = Document::Night.file_name();

/// Files by name and content, what links after what it links to.
pub type Files = Vec<(String, String)>;

/// How a night and the index of all are rendered.
#[derive(Clone, Copy, Debug)]
pub struct Renderer {
    /// A night, with earlier nights of its machine, oldest first.
    pub night: fn(&NightRecord, &[NightRecord]) -> Files,
    /// All nights, with their folders relative to the index, oldest first.
    pub index: fn(&[(String, NightRecord)]) -> Files,
}

/// All nights of a root.
#[derive(Debug, Default)]
pub struct Nights {
    /// Those that can be read, oldest first, with their folders relative to the root.
    pub whole: Vec<(String, NightRecord)>,
    /// Why others cannot.
    pub broken: Vec<StoreError>,
}

/// What was done.
#[derive(Debug)]
pub struct Saved {
    /// The night's folder.
    pub folder: PathBuf,
    /// The night as it was saved, with its comparison.
    pub night: NightRecord,
    /// Nights that could not be read, and are not in the trends and the index.
    pub broken: Vec<StoreError>,
}

/// Tells before a night is measured that it could not be saved in `root`: that nothing can be written there, or that what lies in the place of
/// the index is not one.
///
/// # Errors
/// [`StoreError::Unwritable`], [`StoreError::DiskFull`], [`StoreError::Foreign`].
pub fn check_root(root: &Path) -> Result<(), StoreError> {
    files::check_ours(root, INDEX, NIGHTLY, Document::Night)?;
    files::check_writable(&root.join(NIGHTLY), Document::Night)?;
    files::check_writable(root, Document::Night)
}

/// The same for [`save_into`].
///
/// # Errors
/// As [`check_root`].
pub fn check_folder(folder: &Path) -> Result<(), StoreError> {
    files::check_ours(folder, REPORT, NIGHT, Document::Night)?;
    files::check_writable(folder, Document::Night)
}

/// Compares a night with its baseline in `root`, renders it, writes it into a folder of its own, and writes the index anew. Other processes
/// that save nights wait meanwhile.
///
/// # Errors
/// [`StoreError::Unwritable`], [`StoreError::DiskFull`], [`StoreError::Foreign`]. What was there before is intact then; the night itself may
/// be there, where only the index could not be written.
pub fn save(root: &Path, mut night: NightRecord, renderer: Renderer) -> Result<Saved, StoreError> {
    files::check_ours(root, INDEX, NIGHTLY, Document::Night)?;
    let place = Folder::open(root, Document::Night)?;
    let nightly = root.join(NIGHTLY);
    let nights = Folder::open(&nightly, Document::Night)?;
    let Nights { mut whole, broken } = load(root)?;
    night.comparison = compare::compare_with_baseline(&whole.iter().map(|(_, night)| night).collect::<Vec<_>>(), &night);
    let files = files_of(&night, &whole, renderer);
    let folder = nights.add(&files, |nightly| free_name(nightly, &night))?;
    let name = folder.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    whole.push((format!("{NIGHTLY}/{name}"), night.clone()));
    in_order(&mut whole);
    place.replace(&(renderer.index)(&whole))?;
    Ok(Saved { folder, night, broken })
}

/// Renders a night and writes it into this folder, in place of an earlier one. It is compared with nothing, and stands in no index: for
/// shards, and for nights that are looked at once.
///
/// # Errors
/// [`StoreError::Unwritable`], [`StoreError::DiskFull`]; what was there before is intact then.
pub fn save_into(folder: &Path, night: &NightRecord, renderer: Renderer) -> Result<(), StoreError> {
    files::check_ours(folder, REPORT, NIGHT, Document::Night)?;
    Folder::open(folder, Document::Night)?.replace(&files_of(night, &[], renderer))
}

/// Renders nights anew from their records, each in its own folder; other files stay.
///
/// # Errors
/// [`StoreError::Unwritable`], [`StoreError::DiskFull`]; what was there before is intact then.
pub fn render_again(folder: &Path, night: &NightRecord, earlier: &[(String, NightRecord)], renderer: Renderer) -> Result<(), StoreError> {
    let files = files_of(night, earlier, renderer);
    // The record is what it was.
    let rendered: Vec<(String, String)> = files.into_iter().filter(|(name, _)| name != NIGHT).collect();
    Folder::open(folder, Document::Night)?.replace(&rendered)
}

/// Writes the index of all nights anew, and tells which nights cannot be read.
///
/// # Errors
/// [`StoreError::Unwritable`], [`StoreError::DiskFull`]; the old index is intact then.
pub fn save_index(root: &Path, renderer: Renderer) -> Result<Vec<StoreError>, StoreError> {
    files::check_ours(root, INDEX, NIGHTLY, Document::Night)?;
    let place = Folder::open(root, Document::Night)?;
    let Nights { whole, broken } = load(root)?;
    place.replace(&(renderer.index)(&whole))?;
    Ok(broken)
}

/// Writes one record to a file, in place of an earlier one.
///
/// # Errors
/// [`StoreError::Unwritable`], [`StoreError::DiskFull`]; an earlier file is intact then.
pub fn write(file: &Path, night: &NightRecord) -> Result<(), StoreError> {
    let name = file.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| StoreError::writing(Document::Night, file, ErrorKind::InvalidFilename.into()))?;
    let folder = file.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    Folder::open(folder, Document::Night)?.replace(&[(name.to_owned(), document(night))])
}

/// Reads all nights. A root that is not there has none.
///
/// # Errors
/// [`StoreError::Unreadable`]: the folder of nights itself cannot be read.
pub fn load(root: &Path) -> Result<Nights, StoreError> {
    let nightly = root.join(NIGHTLY);
    let unreadable = |source| StoreError::Unreadable { path: nightly.clone(), source };
    let mut nights = Nights::default();
    let entries = match fs::read_dir(&nightly) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(nights),
        entries => entries.map_err(unreadable)?,
    };
    let mut names = entries.map(|entry| entry.map(|entry| entry.file_name())).collect::<io::Result<Vec<_>>>().map_err(unreadable)?;
    names.sort();
    // Not what a killed process left, and not what somebody else put there.
    let names = names.iter().filter_map(|name| name.to_str()).filter(|name| !name.starts_with('.'));
    for name in names.filter(|name| nightly.join(name).join(NIGHT).exists()) {
        match read(&nightly.join(name)) {
            Ok(night) => nights.whole.push((format!("{NIGHTLY}/{name}"), night)),
            Err(error) => nights.broken.push(error),
        }
    }
    in_order(&mut nights.whole);
    Ok(nights)
}

/// Reads a night back, from the file or from the folder that holds it.
///
/// # Errors
/// [`StoreError::Unreadable`], [`StoreError::Truncated`], [`StoreError::TooNew`], [`StoreError::Malformed`].
pub fn read(path: &Path) -> Result<NightRecord, StoreError> {
    files::read(path, Document::Night, BENCH_RECORD_VERSION)
}

/// Nights that a night may be compared with and judged by: those before it, of the same machine and the same shard, that were not contended
/// and not broken off. In the order given.
pub fn before<'a>(nights: &[&'a NightRecord], new: &NightRecord) -> impl Iterator<Item = &'a NightRecord> {
    nights
        .iter()
        .copied()
        .filter(|night| night.started < new.started && night.machine == new.machine && night.shard == new.shard && may_be_baseline(night))
}

/// Whether it was neither contended nor broken off.
fn may_be_baseline(night: &NightRecord) -> bool {
    night.conditions.contended.is_empty() && night.suites.iter().all(|suite| suite.stopped != Stopped::Interrupted)
}

/// The last of the nights [`before`] it, and in place of suites of the new night that were not measured in that one, or were defined
/// otherwise, those of the last night in which they were: somebody may have run a few suites alone in between. Tells which suites are of
/// another night.
#[must_use]
pub fn baseline(nights: &[&NightRecord], new: &NightRecord) -> Option<(NightRecord, Vec<EarlierBase>)> {
    let mut before: Vec<&NightRecord> = before(nights, new).collect();
    before.sort_by(|a, b| a.started.cmp(&b.started));
    let mut base = (*before.last()?).clone();
    let mut earlier = Vec::new();
    for suite in &new.suites {
        let of = |night: &'_ NightRecord| night.suites.iter().find(|other| is_measured_as(other, suite)).cloned();
        if of(&base).is_some() {
            continue;
        }
        if let Some((night, found)) = before.iter().rev().find_map(|night| Some((night, of(night)?))) {
            base.suites.retain(|other| other.name != suite.name);
            base.suites.push(found);
            earlier.push(EarlierBase { suite: suite.name.clone(), started: night.started.clone() });
        }
    }
    Some((base, earlier))
}

/// Whether it is the same suite, and something was measured.
fn is_measured_as(other: &SuiteRecord, suite: &SuiteRecord) -> bool {
    let measured = |entry: &Entry| matches!(entry.outcome, EntryOutcome::Measured(_));
    other.name == suite.name && other.hash == suite.hash && other.entries.iter().any(measured)
}

/// Of each machine and shard, keeps the last `keep` nights in full, and those that a suite's next night is compared with; of older ones,
/// medians only.
/// Tells which folders it made smaller. Reports and pictures stay as they are.
///
/// # Errors
/// [`StoreError::Unwritable`], [`StoreError::DiskFull`]: each night is then either in full or made smaller, and the next call goes on.
pub fn thin(root: &Path, keep: usize) -> Result<(Vec<String>, Vec<StoreError>), StoreError> {
    let place = Folder::open(root, Document::Night)?;
    let Nights { whole, broken } = load(root)?;
    let mut thinned = Vec::new();
    for (index, (folder, night)) in whole.iter().enumerate() {
        let later = || whole[index + 1..].iter().map(|(_, later)| later).filter(|later| is_alike(later, night));
        let is_recent = later().count() < keep;
        let has = |later: &NightRecord, suite: &SuiteRecord| later.suites.iter().any(|other| is_measured_as(other, suite));
        let is_last_of = |suite: &SuiteRecord| later().all(|later| !may_be_baseline(later) || !has(later, suite));
        let is_baseline = may_be_baseline(night) && night.suites.iter().any(is_last_of);
        if is_recent || is_baseline || !has_samples(night) {
            continue;
        }
        place.replace(&[(format!("{folder}/{NIGHT}"), document(&without_samples(night.clone())))])?;
        thinned.push(folder.clone());
    }
    Ok((thinned, broken))
}

fn is_alike(a: &NightRecord, b: &NightRecord) -> bool {
    a.machine == b.machine && a.shard == b.shard
}

fn has_samples(night: &NightRecord) -> bool {
    let outcomes = night.suites.iter().flat_map(|suite| &suite.entries).map(|entry| &entry.outcome);
    outcomes.into_iter().any(|outcome| matches!(outcome, EntryOutcome::Measured(measured) if !measured.rounds.is_empty()))
}

/// The night with its medians only.
fn without_samples(mut night: NightRecord) -> NightRecord {
    for entry in night.suites.iter_mut().flat_map(|suite| &mut suite.entries) {
        if let EntryOutcome::Measured(measured) = &mut entry.outcome {
            (measured.rounds, measured.yardstick_ps) = (Vec::new(), Vec::new());
        }
    }
    night
}

/// The record before the report, so that what links comes after what it links to.
fn files_of(night: &NightRecord, others: &[(String, NightRecord)], renderer: Renderer) -> Files {
    let is_earlier = |other: &&NightRecord| other.started < night.started && is_alike(other, night);
    // Trends are drawn from medians.
    let earlier: Vec<NightRecord> = others.iter().map(|(_, other)| other).filter(is_earlier).cloned().map(without_samples).collect();
    let record = (NIGHT.to_owned(), document(night));
    [record].into_iter().chain((renderer.night)(night, &earlier)).collect()
}

/// One line a suite, so that two files can be compared line by line.
fn document(night: &NightRecord) -> String {
    let suites: Vec<String> = night.suites.iter().map(to_json).collect();
    let whole = to_json(&NightRecord { suites: Vec::new(), ..night.clone() });
    whole.replacen("\"suites\":[]", &format!("\"suites\":[\n{}\n]", suites.join(",\n")), 1) + "\n"
}

fn to_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("records are plain data with text keys, which always have a JSON form")
}

fn in_order(nights: &mut [(String, NightRecord)]) {
    nights.sort_by(|(folder_a, a), (folder_b, b)| (&a.started, folder_a).cmp(&(&b.started, folder_b)));
}

/// `2026-11-20-nvidia-h200`, or with a number behind it where that is taken.
fn free_name(nightly: &Path, night: &NightRecord) -> io::Result<String> {
    let date = slug(night.started.split('T').next().unwrap_or_default());
    let device = if night.machine.clock == Clock::Simulated { "sim".to_owned() } else { slug(&night.machine.device) };
    let shard = night.shard.map_or_else(String::new, |shard| format!("-{}of{}", shard.index, shard.count));
    let plain = format!("{date}-{device}{shard}");
    let names = std::iter::once(plain.clone()).chain((2_u32..).map(|number| format!("{plain}-{number}")));
    for name in names {
        if !nightly.join(&name).try_exists()? {
            return Ok(name);
        }
    }
    Err(ErrorKind::AlreadyExists.into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::examples::{self, Sampled};
    use crate::record::{ChangeVerdict, Quantity, Shard};
    use harness_base::files::TEMPORARY;

    /// Renders just enough to tell what it was given.
    const RENDERER: Renderer = Renderer {
        night: |night, earlier| vec![("report.md".to_owned(), format!("{} after {}", night.started, earlier.len()))],
        index: |nights| vec![("README.md".to_owned(), nights.iter().map(|(folder, _)| format!("{folder}\n")).collect())],
    };

    fn night(day: u32) -> NightRecord {
        examples::night(day, &[Sampled::noisy("caching", 20_000, 0.01), Sampled::steady("direct", 4096).of(Quantity::Memory)])
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn index(root: &Path) -> String {
        fs::read_to_string(root.join("README.md")).unwrap()
    }

    /// A root with nights of these days.
    fn root(days: impl IntoIterator<Item = u32>) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for day in days {
            save(root.path(), night(day), RENDERER).unwrap();
        }
        root
    }

    fn samples(root: &Path) -> Vec<bool> {
        load(root).unwrap().whole.iter().map(|(_, night)| has_samples(night)).collect()
    }

    fn told(error: &StoreError, folder: &Path) -> String {
        error.to_string().replace(folder.to_str().unwrap(), "…")
    }

    #[test]
    fn nights_read_back_as_they_were_in_the_order_of_their_beginning() {
        let root = root([12, 10, 11]);
        let nights = load(root.path()).unwrap();
        let started: Vec<&str> = nights.whole.iter().map(|(_, night)| &night.started[..10]).collect();
        assert_eq!(started, ["2026-11-10", "2026-11-11", "2026-11-12"]);
        assert!(nights.broken.is_empty());
        let saved = save(root.path(), night(13), RENDERER).unwrap();
        assert_eq!(read(&saved.folder).unwrap(), saved.night);
        assert_eq!(read(&saved.folder.join(NIGHT)).unwrap(), saved.night);
        assert_eq!(saved.night.comparison.unwrap().base_started, "2026-11-12T02:00:00Z");
    }

    #[test]
    fn folders_are_named_by_date_device_and_shard_and_numbered_where_taken() {
        let root = root([10, 10, 11, 10]);
        let mut gpu = night(10);
        gpu.machine.device = "NVIDIA H200".to_owned();
        gpu.machine.clock = Clock::Measured;
        gpu.shard = Some(Shard { index: 1, count: 2 });
        save(root.path(), gpu, RENDERER).unwrap();
        let folders = names(&root.path().join(NIGHTLY));
        assert_eq!(folders, ["2026-11-10-nvidia-h200-1of2", "2026-11-10-sim", "2026-11-10-sim-2", "2026-11-10-sim-3", "2026-11-11-sim"]);
        assert_eq!(index(root.path()).lines().count(), 5);
        assert_eq!(names(&root.path().join("nightly/2026-11-10-sim")), [NIGHT, "report.md"]);
    }

    #[test]
    fn writers_at_the_same_time_lose_no_night_and_the_index_has_all() {
        let root = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| save(root.path(), night(10), RENDERER).unwrap());
            }
        });
        assert_eq!(names(&root.path().join(NIGHTLY)).len(), 6);
        assert_eq!(index(root.path()).lines().count(), 6);
    }

    #[test]
    fn a_broken_night_is_told_and_the_others_are_used() {
        let root = root([10, 11, 12, 13]);
        let file = |day| root.path().join(format!("nightly/2026-11-{day}-sim")).join(NIGHT);
        let whole = fs::read_to_string(file(11)).unwrap();
        fs::write(file(11), &whole[..whole.len() / 2]).unwrap();
        fs::write(file(12), r#"{"version": 99}"#).unwrap();
        fs::write(file(13), r#"{"version": 1, "harness": "0.1.0"}"#).unwrap();
        let saved = save(root.path(), night(14), RENDERER).unwrap();
        let told: Vec<String> = saved.broken.iter().map(|error| told(error, root.path())).collect();
        insta::assert_snapshot!(told.join("\n"), @"
        `…/nightly/2026-11-11-sim/night.json` is cut off at line 2: it ends in the middle of a record. Copy it again, or run again.
        `…/nightly/2026-11-12-sim/night.json` has version 99, this harness reads up to version 3: use the harness that wrote it, or a newer one.
        `…/nightly/2026-11-13-sim/night.json` does not hold a night: missing field `started` at line 1 column 34. Name a `night.json` that `harness bench` wrote, or its folder.
        ");
        assert_eq!(fs::read_to_string(saved.folder.join("report.md")).unwrap(), "2026-11-14T02:00:00Z after 1");
        assert_eq!(index(root.path()), "nightly/2026-11-10-sim\nnightly/2026-11-14-sim\n");
    }

    #[test]
    fn what_a_killed_process_left_is_not_read_and_removed_by_the_next() {
        let root = root([10]);
        let left = root.path().join(NIGHTLY).join(format!("{TEMPORARY}abc"));
        fs::create_dir(&left).unwrap();
        fs::write(left.join(NIGHT), "{\"ver").unwrap();
        fs::write(root.path().join(format!("{TEMPORARY}index")), "half").unwrap();
        assert!(load(root.path()).unwrap().broken.is_empty());
        save(root.path(), night(11), RENDERER).unwrap();
        assert_eq!(names(&root.path().join(NIGHTLY)), ["2026-11-10-sim", "2026-11-11-sim"]);
        assert_eq!(names(root.path()), ["README.md", NIGHTLY]);
    }

    #[test]
    fn an_index_that_cannot_be_written_leaves_the_old_one_and_the_next_puts_it_right() {
        let root = root([10]);
        let before = index(root.path());
        // A file of the index cannot be written, for a folder has its name.
        fs::create_dir(root.path().join("trend.svg")).unwrap();
        let with_trend = |nights: &[(String, NightRecord)]| {
            let trend = ("trend.svg".to_owned(), String::new());
            (RENDERER.index)(nights).into_iter().chain([trend]).collect()
        };
        save(root.path(), night(11), Renderer { index: with_trend, ..RENDERER }).unwrap_err();
        assert_eq!(index(root.path()), before);
        assert!(save_index(root.path(), RENDERER).unwrap().is_empty());
        assert_eq!(index(root.path()), "nightly/2026-11-10-sim\nnightly/2026-11-11-sim\n");
        assert_eq!(names(root.path()), ["README.md", NIGHTLY, "trend.svg"]);
    }

    #[test]
    fn older_nights_are_thinned_to_medians_once() {
        let root = root(1..=6);
        let before = load(root.path()).unwrap().whole;
        let (thinned, broken) = thin(root.path(), 4).unwrap();
        assert_eq!(thinned, ["nightly/2026-11-01-sim", "nightly/2026-11-02-sim"]);
        assert!(broken.is_empty());
        assert_eq!(samples(root.path()), [false, false, true, true, true, true]);
        let after = load(root.path()).unwrap().whole;
        assert_eq!(after[0].1, without_samples(before[0].1.clone()));
        assert_eq!(after[2..], before[2..]);
        assert_eq!(thin(root.path(), 4).unwrap().0, Vec::<String>::new());
        assert_eq!(names(&root.path().join(&after[0].0)), [NIGHT, "report.md"]);
    }

    #[test]
    fn the_last_baseline_of_each_machine_is_kept_in_full() {
        let root = root([1]);
        let mut other = night(2);
        other.machine.driver = Some("580.65.06".to_owned());
        save(root.path(), other, RENDERER).unwrap();
        for day in 3..=5 {
            let mut contended = night(day);
            contended.conditions.contended.push("a busy processor".to_owned());
            save(root.path(), contended, RENDERER).unwrap();
        }
        assert_eq!(thin(root.path(), 1).unwrap().0.len(), 2);
        assert_eq!(samples(root.path()), [true, true, false, false, true]);
        thin(root.path(), 0).unwrap();
        assert_eq!(samples(root.path()), [true, true, false, false, false]);
    }

    #[test]
    fn a_later_night_that_measured_nothing_of_a_suite_is_no_reason_to_thin_its_baseline() {
        let root = root([1]);
        let mut skipped = night(2);
        for entry in &mut skipped.suites[0].entries {
            entry.outcome = EntryOutcome::Skipped { reason: "no memory".to_owned() };
        }
        save(root.path(), skipped, RENDERER).unwrap();
        assert_eq!(thin(root.path(), 1).unwrap().0, Vec::<String>::new());
        assert!(samples(root.path())[0]);
    }

    #[test]
    fn a_night_rendered_again_keeps_its_record() {
        let root = root([10, 11]);
        let nights = load(root.path()).unwrap().whole;
        let (folder, night) = &nights[1];
        let folder = root.path().join(folder);
        let before = fs::read(folder.join(NIGHT)).unwrap();
        fs::write(folder.join("report.md"), "spoiled").unwrap();
        render_again(&folder, night, &nights, RENDERER).unwrap();
        assert_eq!(fs::read_to_string(folder.join("report.md")).unwrap(), "2026-11-11T02:00:00Z after 1");
        assert_eq!(fs::read(folder.join(NIGHT)).unwrap(), before);
    }

    #[test]
    fn the_baseline_is_the_last_uncontended_night_before_of_the_same_machine_and_shard() {
        let mut nights: Vec<NightRecord> = (1..=9).map(night).collect();
        nights[7].conditions.contended.push("1 other process on the GPU".to_owned());
        nights[6].machine.driver = Some("580.65.06".to_owned());
        nights[5].shard = Some(Shard { index: 1, count: 2 });
        nights[4].suites[0].stopped = Stopped::Interrupted;
        let nights: Vec<&NightRecord> = nights.iter().rev().collect();
        assert_eq!(baseline(&nights, nights[0]).map(|(night, _)| night.started), Some("2026-11-04T02:00:00Z".to_owned()));
        assert_eq!(baseline(&nights, nights[8]), None);
        assert_eq!(baseline(&[], nights[0]), None);
    }

    #[test]
    fn a_root_that_is_not_there_has_no_nights_and_a_file_in_its_place_is_told() {
        let root = tempfile::tempdir().unwrap();
        assert!(load(&root.path().join("missing")).unwrap().whole.is_empty());
        let file = root.path().join("file");
        fs::write(&file, "a file").unwrap();
        insta::assert_snapshot!(told(&save(&file, night(1), RENDERER).unwrap_err(), root.path()), @"cannot write to `…/file`: not a directory. Make it writable, or choose another place.");
    }

    #[test]
    fn a_night_cut_off_anywhere_is_never_read_as_whole() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join(NIGHT);
        let whole = document(&night(1));
        for end in (0..whole.trim_end().len()).step_by(53) {
            fs::write(&file, &whole[..end]).unwrap();
            assert!(matches!(read(&file), Err(StoreError::Truncated { .. })), "cut at byte {end}");
        }
    }

    /// Kept as they were written, so that later versions go on reading them.
    #[test]
    fn a_night_of_each_version_is_read() {
        let verdicts = [ChangeVerdict::Same, ChangeVerdict::Untested, ChangeVerdict::Untested];
        assert_eq!(verdicts.len(), BENCH_RECORD_VERSION as usize, "each version has a night here");
        for (version, verdict) in (1..).zip(verdicts) {
            let file = format!("{}/tests/nights/version-{version}.json", env!("CARGO_MANIFEST_DIR"));
            let night = read(Path::new(&file)).unwrap();
            assert_eq!((night.version, night.started.as_str()), (version, "2026-11-20T02:00:00Z"));
            assert_is_known(&night, verdict);
        }
    }

    fn assert_is_known(night: &NightRecord, verdict: ChangeVerdict) {
        let outcomes: Vec<&EntryOutcome> = night.suites.iter().flat_map(|suite| &suite.entries).map(|entry| &entry.outcome).collect();
        let [EntryOutcome::Measured(measured), EntryOutcome::Failed { .. }, EntryOutcome::Skipped { .. }] = outcomes[..] else {
            panic!("{outcomes:?}")
        };
        assert_eq!(measured.rounds[1], [20_240, 20_260]);
        assert_eq!((measured.summary.median, measured.summary.p99), (20_250, None));
        let change = &night.comparison.as_ref().unwrap().changes[0];
        let figures = change.figures.unwrap();
        assert_eq!((figures.ratio, figures.p, change.verdict), (1.0123, 0.5, verdict));
        assert_eq!(night.suites[0].entries[0].case(), "hit, 2 MiB");
    }

    #[test]
    fn fractions_are_read_back_to_the_last_digit() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join(NIGHT);
        for threshold in [0.1 + 0.2, 1.0 / 3.0, 5e-324, 0.050_000_000_000_000_044, f64::MAX] {
            let mut night = night(1);
            night.suites[0].threshold = threshold;
            write(&file, &night).unwrap();
            assert_eq!(read(&file).unwrap(), night);
        }
    }
}
