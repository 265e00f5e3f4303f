//! Merges the shards of one run.
//!
//! Shards must have the same build, seed and number of shards, and appear once. The merged run does not record differences
//! between the machines.

use std::collections::BTreeSet;

use super::record::{BenchRun, Shard, SuiteRecord};

/// Merges shards in any order. The merged run has the earliest start and the longest duration.
/// The error says why they are not one run.
pub fn merge(shards: &[BenchRun], allow_missing: bool) -> Result<BenchRun, String> {
    let shard_of = |run: &BenchRun| run.shard.ok_or_else(|| format!("the run of {} is not a shard", run.started));
    let mut parts = shards.iter().map(|run| Ok((shard_of(run)?, run))).collect::<Result<Vec<_>, String>>()?;
    parts.sort_by_key(|(shard, _)| shard.index);
    let Some(&(first, base)) = parts.first() else { return Err("no shards are given".to_owned()) };
    if let Some(pair) = parts.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(format!("shard {} appears twice", pair[0].0));
    }
    for (shard, run) in &parts {
        let differs = [
            (shard.count != first.count, "their number"),
            (run.build != base.build, "the build"),
            (run.accepted != base.accepted, "the accepted build"),
            (run.seed != base.seed, "the seed"),
            (!run.machine.is_same_device(&base.machine), "the device"),
        ];
        if let Some((_, what)) = differs.into_iter().find(|(differs, _)| *differs) {
            return Err(format!("shards {first} and {shard} differ in {what}"));
        }
    }
    let there: BTreeSet<u32> = parts.iter().map(|(shard, _)| shard.index).collect();
    let missing: Vec<Shard> =
        (1..=first.count).filter(|index| !there.contains(index)).map(|index| Shard { index, count: first.count }).collect();
    if !missing.is_empty() && !allow_missing {
        let missing: Vec<String> = missing.iter().map(ToString::to_string).collect();
        return Err(format!("missing: shard {}", missing.join(", ")));
    }
    let mut whole = BenchRun { shard: None, suites: Vec::new(), comparison: None, ..base.clone() };
    whole.conditions.contended.extend(missing.iter().map(|shard| format!("shard {shard} is missing")));
    for (index, (_, run)) in parts.iter().enumerate() {
        whole.started = whole.started.min(run.started.clone());
        whole.took_ms = whole.took_ms.max(run.took_ms);
        for (all, part) in [(&mut whole.gate.lost, &run.gate.lost), (&mut whole.gate.redefined, &run.gate.redefined)] {
            all.extend(part.iter().filter(|name| !all.contains(name)).cloned().collect::<Vec<_>>());
        }
        run.suites.iter().for_each(|suite| add(&mut whole.suites, suite));
        if index > 0 {
            whole.conditions.contended.extend(run.conditions.contended.iter().cloned());
            whole.conditions.gpu.extend(run.conditions.gpu.iter().cloned());
        }
    }
    whole.suites.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(whole)
}

fn add(suites: &mut Vec<SuiteRecord>, suite: &SuiteRecord) {
    match suites.iter_mut().find(|known| known.name == suite.name) {
        Some(known) => {
            known.rounds = known.rounds.max(suite.rounds);
            known.entries.extend(suite.entries.iter().cloned());
        }
        None => suites.push(suite.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::examples::{self, Sampled};

    fn shard(index: u32, arm: &str) -> BenchRun {
        BenchRun { shard: Some(Shard { index, count: 2 }), ..examples::run(1, &[Sampled::noisy(arm, 20_000.0, 0.01)]) }
    }

    #[test]
    fn shards_become_one_run_in_any_order() {
        let whole = merge(&[shard(2, "b"), shard(1, "a")], false).expect("they belong together");
        let arms: Vec<&str> = whole.entries().map(|(_, entry)| entry.arm.as_str()).collect();
        assert_eq!((whole.shard, whole.suites.len(), arms), (None, 1, vec!["a", "b"]));
    }

    #[test]
    fn what_does_not_belong_together_is_refused_with_the_reason() {
        let told = |shards: &[BenchRun]| merge(shards, false).expect_err("it is refused");
        assert_eq!(told(&[]), "no shards are given");
        assert_eq!(told(&[shard(1, "a")]), "missing: shard 2/2");
        assert_eq!(told(&[shard(1, "a"), shard(1, "a")]), "shard 1/2 appears twice");
        assert_eq!(told(&[BenchRun { shard: None, ..shard(1, "a") }]), "the run of 2026-11-01T02:00:00Z is not a shard");
        assert_eq!(told(&[shard(1, "a"), BenchRun { seed: 2, ..shard(2, "b") }]), "shards 1/2 and 2/2 differ in the seed");
    }

    #[test]
    fn a_missing_shard_makes_the_run_contended() {
        let whole = merge(&[shard(1, "a")], true).expect("it is allowed");
        assert_eq!(whole.conditions.contended, ["shard 2/2 is missing"]);
    }
}
