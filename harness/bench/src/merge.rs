//! Shards of one night, done on several machines or one after another, put together.
//!
//! What must be equal: the versions, the build, the seed, the day (or the day before), the number of shards, the definitions of suites that several shards have, and all of
//! the machine but which one of its kind it was (the GPU's UUID) and the kernel of its operating system. Where those two differ, the merged
//! night does not state them. Where the entries of a suite are divided among shards, the rounds of one shard come behind those of the shard
//! before it, and an entry has no samples in the rounds of other shards: so each round keeps its own yardstick.

use std::collections::btree_map::Entry as Slot;
use std::collections::{BTreeMap, BTreeSet};

use super::history::entry_name;
use super::record::{Conditions, EntryName, EntryOutcome, Machine, Measured, NightRecord, Shard, Stopped, SuiteRecord};
use harness_base::date::Date;

/// Why shards do not make a night.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// There is nothing to merge. Name the shards.
    #[error("there are no shards to merge: name their `night.json` files or folders")]
    Nothing,
    /// One is a whole night. Leave it out.
    #[error("the night of {started} is no shard but a whole night: leave it out")]
    Whole {
        /// When it began.
        started: String,
    },
    /// Something differs that must not. Leave out what is of another night, or measure it again.
    #[error("shards {first} and {other} do not belong together: {what}. Leave out the one that is of another night, or measure it again.")]
    Different {
        /// The first shard.
        first: Shard,
        /// The one that differs from it.
        other: Shard,
        /// What differs, in words.
        what: String,
    },
    /// The same shard twice. Leave one of them out.
    #[error("shard {shard} is there twice, begun {} and {}: leave one of them out", started.0, started.1)]
    Duplicate {
        /// Which.
        shard: Shard,
        /// When each began.
        started: (String, String),
    },
    /// The number of a shard is not one from 1 to the number of shards. The file is damaged.
    #[error("there is no shard {shard}: its file is damaged, measure it again")]
    Impossible {
        /// Which.
        shard: Shard,
    },
    /// Not all shards are there. Find them, or ask for a night without them.
    #[error("shards are missing: {}. Name them too, or merge without them with `--allow-missing`.", listed(missing))]
    Missing {
        /// Which.
        missing: Vec<Shard>,
    },
    /// Two shards measured the same. Measure one of them again.
    #[error("shards {} and {} both hold `{}`: they were not divided alike, measure one of them again", shards.0, shards.1, name_of(entry))]
    Overlapping {
        /// The shards.
        shards: (Shard, Shard),
        /// What both hold.
        entry: Box<EntryName>,
    },
}

fn listed(shards: &[Shard]) -> String {
    shards.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn name_of(entry: &EntryName) -> String {
    format!("{}: {}, {}", entry.suite, entry.case, entry.arm)
}

/// Puts shards together, in whatever order they are given. Where some are missing and that is allowed, the night says so among what makes it
/// contended, so that it is no baseline: later nights would lack what it lacks.
///
/// # Errors
/// [`MergeError`], each with what to do.
pub fn merge(shards: &[NightRecord], allow_missing: bool) -> Result<NightRecord, MergeError> {
    let shards = in_order(shards)?;
    let Some((&(first_shard, first), others)) = shards.split_first() else { return Err(MergeError::Nothing) };
    for &(other, night) in others {
        let what = differences((first_shard, first), (other, night));
        if !what.is_empty() {
            return Err(MergeError::Different { first: first_shard, other, what: what.join("; ") });
        }
    }
    let missing = missing(&shards, first_shard.count)?;
    if !missing.is_empty() && !allow_missing {
        return Err(MergeError::Missing { missing });
    }
    refuse_overlaps(&shards)?;
    let nights: Vec<&NightRecord> = shards.iter().map(|(_, night)| *night).collect();
    Ok(NightRecord {
        version: first.version,
        harness: first.harness.clone(),
        started: nights.iter().map(|night| night.started.clone()).min().unwrap_or_default(),
        took_ms: nights.iter().map(|night| night.took_ms).max().unwrap_or_default(),
        seed: first.seed,
        reproduce: nights.iter().map(|night| night.reproduce.as_str()).collect::<Vec<_>>().join("; "),
        shard: None,
        build: first.build.clone(),
        machine: machine(&nights),
        conditions: conditions(&shards, &missing),
        suites: suites(&nights),
        comparison: None,
    })
}

type Part<'a> = (Shard, &'a NightRecord);

fn in_order(nights: &[NightRecord]) -> Result<Vec<Part<'_>>, MergeError> {
    let parts = nights.iter().map(|night| match night.shard {
        Some(shard) => Ok((shard, night)),
        None => Err(MergeError::Whole { started: night.started.clone() }),
    });
    let mut parts = parts.collect::<Result<Vec<_>, _>>()?;
    parts.sort_by_key(|(shard, _)| (shard.index, shard.count));
    Ok(parts)
}

/// What must be equal and is not, in words.
fn differences((first_shard, first): Part<'_>, (other_shard, other): Part<'_>) -> Vec<String> {
    let mut differences = Vec::new();
    let mut compare = |what: &str, first: String, other: String| {
        if first != other {
            differences.push(format!("{what}: {first} against {other}"));
        }
    };
    compare("number of shards", first_shard.count.to_string(), other_shard.count.to_string());
    compare("record version", first.version.to_string(), other.version.to_string());
    compare("harness", first.harness.clone(), other.harness.clone());
    let commit = |night: &NightRecord| night.build.commit.clone().unwrap_or_else(|| "unknown".to_owned());
    compare("commit", commit(first), commit(other));
    let dirty = |night: &NightRecord| match night.build.dirty {
        Some(true) => "yes",
        Some(false) => "no",
        None => "unknown",
    };
    compare("changes beside the commit", dirty(first).to_owned(), dirty(other).to_owned());
    compare("seed", first.seed.to_string(), other.seed.to_string());
    if !is_one_night(&first.started, &other.started) {
        compare("begin", first.started.clone(), other.started.clone());
    }
    let definitions = |night: &NightRecord| -> BTreeMap<String, String> {
        night.suites.iter().map(|suite| (suite.name.clone(), format!("{} at {}", suite.hash, suite.threshold))).collect()
    };
    let theirs = definitions(other);
    for (name, ours) in definitions(first) {
        let theirs = theirs.get(&name).cloned().unwrap_or_else(|| ours.clone());
        compare(&format!("definition of suite {name}"), ours, theirs);
    }
    let same_kind = Machine { uuid_hash: first.machine.uuid_hash.clone(), kernel: first.machine.kernel.clone(), ..other.machine.clone() };
    differences.extend(first.machine.differences(&same_kind));
    differences
}

/// Whether moments such as `2026-11-20T02:17:00Z` are of one day or of two that follow each other: what a queue held back until after midnight
/// is of the same night; what an earlier night left behind is not.
fn is_one_night(one: &str, other: &str) -> bool {
    let day = |moment: &str| Date::try_from(moment.split('T').next().unwrap_or_default().to_owned()).ok();
    match (day(one), day(other)) {
        (Some(one), Some(other)) => one == other || one.next() == other || other.next() == one,
        _ => one == other,
    }
}

fn missing(shards: &[Part<'_>], count: u32) -> Result<Vec<Shard>, MergeError> {
    for pair in shards.windows(2) {
        if let [(shard, one), (next, other)] = pair
            && shard == next
        {
            return Err(MergeError::Duplicate { shard: *shard, started: (one.started.clone(), other.started.clone()) });
        }
    }
    if let Some(&(shard, _)) = shards.iter().find(|(shard, _)| !(1..=count).contains(&shard.index)) {
        return Err(MergeError::Impossible { shard });
    }
    let there: BTreeSet<u32> = shards.iter().map(|(shard, _)| shard.index).collect();
    Ok((1..=count).filter(|index| !there.contains(index)).map(|index| Shard { index, count }).collect())
}

fn refuse_overlaps(shards: &[Part<'_>]) -> Result<(), MergeError> {
    let mut seen = BTreeMap::new();
    for &(shard, night) in shards {
        for entry in night.suites.iter().flat_map(|suite| suite.entries.iter().map(|entry| entry_name(suite, entry))) {
            if let Some(earlier) = seen.insert(entry.clone(), shard)
                && earlier != shard
            {
                return Err(MergeError::Overlapping { shards: (earlier, shard), entry: Box::new(entry) });
            }
        }
    }
    Ok(())
}

fn suites(nights: &[&NightRecord]) -> Vec<SuiteRecord> {
    let mut suites: BTreeMap<&str, SuiteRecord> = BTreeMap::new();
    for part in nights.iter().flat_map(|night| &night.suites) {
        match suites.entry(&part.name) {
            Slot::Vacant(slot) => {
                slot.insert(part.clone());
            }
            Slot::Occupied(slot) => append(slot.into_mut(), part),
        }
    }
    suites.into_values().collect()
}

/// The rounds of `part` behind those that are there.
fn append(suite: &mut SuiteRecord, part: &SuiteRecord) {
    let before = suite.yardstick_ps.len();
    suite.entries.extend(part.entries.iter().cloned().map(|mut entry| {
        if let EntryOutcome::Measured(Measured { rounds, yardstick_ps, .. }) = &mut entry.outcome
            && !rounds.is_empty()
        {
            rounds.splice(0..0, std::iter::repeat_n(Vec::new(), before));
            if !yardstick_ps.is_empty() {
                yardstick_ps.splice(0..0, std::iter::repeat_n(0, before));
            }
        }
        entry
    }));
    suite.yardstick_ps.extend(&part.yardstick_ps);
    suite.allocators.extend(part.allocators.clone());
    suite.rounds += part.rounds;
    suite.overhead_ps = suite.overhead_ps.max(part.overhead_ps);
    suite.stopped = match (suite.stopped, part.stopped) {
        (Stopped::Interrupted, _) | (_, Stopped::Interrupted) => Stopped::Interrupted,
        (Stopped::Budget, _) | (_, Stopped::Budget) => Stopped::Budget,
        (Stopped::Precise, _) | (_, Stopped::Precise) => Stopped::Precise,
        (Stopped::Deterministic, Stopped::Deterministic) => Stopped::Deterministic,
    };
}

/// What all shards have.
fn machine(nights: &[&NightRecord]) -> Machine {
    let common = |fact: fn(&Machine) -> &Option<String>| {
        let first = nights.first().and_then(|night| fact(&night.machine).clone());
        first.filter(|first| nights.iter().all(|night| fact(&night.machine).as_ref() == Some(first)))
    };
    let (uuid_hash, kernel) = (common(|machine| &machine.uuid_hash), common(|machine| &machine.kernel));
    Machine { uuid_hash, kernel, ..nights[0].machine.clone() }
}

fn conditions(shards: &[Part<'_>], missing: &[Shard]) -> Conditions {
    let contended =
        shards.iter().flat_map(|(shard, night)| night.conditions.contended.iter().map(move |why| format!("shard {shard}: {why}")));
    let missing = (!missing.is_empty()).then(|| format!("shards are missing: {}", listed(missing)));
    Conditions {
        free_at_start: shards.iter().filter_map(|(_, night)| night.conditions.free_at_start).min(),
        gpu: shards.iter().flat_map(|(_, night)| night.conditions.gpu.clone()).collect(),
        contended: contended.chain(missing).collect(),
        cost_figures: shards[0].1.conditions.cost_figures.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{Terms, compare};
    use crate::examples::{self, Sampled};
    use crate::record::ChangeVerdict;

    fn shard(index: u32, count: u32, arms: &[&str]) -> NightRecord {
        let entries: Vec<Sampled> = arms.iter().map(|arm| Sampled::noisy(arm, 20_000, 0.01)).collect();
        NightRecord { shard: Some(Shard { index, count }), ..examples::sampled(20, u64::from(index), &entries) }
    }

    fn refusal(shards: &[NightRecord]) -> String {
        merge(shards, false).expect_err("they do not belong together").to_string()
    }

    #[test]
    fn shards_in_any_order_make_a_night_of_all_entries() {
        let (mut one, mut two, three) = (shard(1, 3, &["a"]), shard(2, 3, &["b", "c"]), shard(3, 3, &["d"]));
        one.started = "2026-11-20T03:00:00Z".to_owned();
        two.machine.uuid_hash = Some("0011223344556677".to_owned());
        two.took_ms = 90_000;
        let night = merge(&[three.clone(), one.clone(), two.clone()], false).expect("they belong together");
        let arms: Vec<&str> = night.suites[0].entries.iter().map(|entry| entry.arm.as_str()).collect();
        assert_eq!(arms, ["a", "b", "c", "d"]);
        assert_eq!((night.started.as_str(), night.took_ms, night.shard), ("2026-11-20T02:00:00Z", 90_000, None));
        assert_eq!((night.suites.len(), night.suites[0].rounds, night.machine.uuid_hash), (1, 90, None));
        assert_eq!(night.machine.kernel, one.machine.kernel);
        assert_eq!(merge(&[one, two, three], false).expect("they belong together").suites, night.suites);
    }

    #[test]
    fn each_entry_keeps_the_yardstick_of_its_own_rounds() {
        // The second machine ran at half the speed.
        let (one, mut two) = (shard(1, 2, &["a"]), shard(2, 2, &["b"]));
        let whole = |one: &NightRecord, two: &NightRecord| merge(&[one.clone(), two.clone()], false).expect("they belong together");
        let base = whole(&one, &two);
        let suite = &mut two.suites[0];
        suite.yardstick_ps.iter_mut().for_each(|value| *value *= 2);
        if let EntryOutcome::Measured(measured) = &mut suite.entries[0].outcome {
            measured.rounds.iter_mut().flatten().for_each(|sample| *sample *= 2);
        }
        assert_same(&base, &whole(&one, &two));
        // And those beside its visits, where it has them.
        let suite = &mut two.suites[0];
        if let EntryOutcome::Measured(measured) = &mut suite.entries[0].outcome {
            measured.yardstick_ps = std::mem::replace(&mut suite.yardstick_ps, vec![1; measured.rounds.len()]);
        }
        assert_same(&base, &whole(&one, &two));
    }

    fn assert_same(base: &NightRecord, new: &NightRecord) {
        let comparison = compare(base, new, Terms::default()).expect("the machines are equal");
        assert!(comparison.changes.iter().all(|change| change.verdict == ChangeVerdict::Same), "{comparison:?}");
        assert!(comparison.changes.iter().all(|change| change.figures.is_some_and(|figures| (0.999..1.001).contains(&figures.ratio))));
    }

    #[test]
    fn missing_shards_are_an_error_or_said_in_the_night() {
        let shards = [shard(2, 4, &["b"]), shard(3, 4, &["c"])];
        insta::assert_snapshot!(refusal(&shards), @"shards are missing: 1/4, 4/4. Name them too, or merge without them with `--allow-missing`.");
        let night = merge(&shards, true).expect("it is allowed");
        assert_eq!(night.conditions.contended, ["shards are missing: 1/4, 4/4"]);
        assert_eq!(night.suites[0].entries.len(), 2);
    }

    #[test]
    fn what_does_not_belong_together_is_refused_with_the_reason() {
        insta::assert_snapshot!(refusal(&[]), @"there are no shards to merge: name their `night.json` files or folders");
        let one = shard(1, 2, &["a"]);
        let whole = NightRecord { shard: None, ..one.clone() };
        insta::assert_snapshot!(refusal(&[whole]), @"the night of 2026-11-20T02:00:00Z is no shard but a whole night: leave it out");
        insta::assert_snapshot!(refusal(&[one.clone(), one.clone()]), @"shard 1/2 is there twice, begun 2026-11-20T02:00:00Z and 2026-11-20T02:00:00Z: leave one of them out");
        insta::assert_snapshot!(refusal(&[one.clone(), shard(2, 2, &["a"])]), @"shards 1/2 and 2/2 both hold `host: hit, a`: they were not divided alike, measure one of them again");
        insta::assert_snapshot!(refusal(&[one.clone(), shard(3, 2, &["b"])]), @"there is no shard 3/2: its file is damaged, measure it again");
        let mut late = NightRecord { started: "2026-11-21T01:00:00Z".to_owned(), ..shard(2, 2, &["b"]) };
        assert!(merge(&[one.clone(), late.clone()], false).is_ok(), "a queue held it back");
        late.started = "2026-11-22T02:00:00Z".to_owned();
        insta::assert_snapshot!(refusal(&[one.clone(), late]), @"shards 1/2 and 2/2 do not belong together: begin: 2026-11-20T02:00:00Z against 2026-11-22T02:00:00Z. Leave out the one that is of another night, or measure it again.");
        let mut other = shard(2, 3, &["b"]);
        other.build.dirty = Some(true);
        other.machine.driver = Some("580.65.06".to_owned());
        other.suites[0].hash = "2".to_owned();
        insta::assert_snapshot!(refusal(&[one, other]), @"shards 1/2 and 2/3 do not belong together: number of shards: 2 against 3; changes beside the commit: no against yes; definition of suite host: 1 at 0.05 against 2 at 0.05; driver: unknown against 580.65.06. Leave out the one that is of another night, or measure it again.");
    }

    #[test]
    fn what_disturbed_a_shard_is_said_in_the_night() {
        let (one, mut two) = (shard(1, 2, &["a"]), shard(2, 2, &["b"]));
        two.conditions.contended.push("a busy processor".to_owned());
        let night = merge(&[one, two], false).expect("they belong together");
        assert_eq!(night.conditions.contended, ["shard 2/2: a busy processor"]);
    }
}
