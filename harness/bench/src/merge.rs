//! Merges the shards of one run.
//!
//! Shards must have the same build, seed and number of shards, and appear once. The merged run does
//! not record differences between the machines.

use std::collections::BTreeMap;

use harness_base::shard;

use super::record::{BenchRun, SuiteRecord};

/// Merges shards in any order.
pub fn merge(shards: &[BenchRun], allow_missing: bool) -> Result<BenchRun, String> {
    let shard_of = |run: &BenchRun| {
        run.shard
            .ok_or_else(|| format!("the run of {} is not a shard", run.started))
    };
    let mut parts = shards
        .iter()
        .map(|run| Ok((shard_of(run)?, run)))
        .collect::<Result<Vec<_>, String>>()?;
    parts.sort_by_key(|(shard, _)| shard.index);
    let Some(&(first, base)) = parts.first() else {
        return Err("no shards are given".to_owned());
    };
    let missing = shard::missing(&parts.iter().map(|(shard, _)| *shard).collect::<Vec<_>>())?;
    for (shard, run) in &parts {
        let differs = [
            (run.build != base.build, "the build"),
            (run.accepted != base.accepted, "the accepted build"),
            (run.seed != base.seed, "the seed"),
            (!run.machine.is_same_device(&base.machine), "the device"),
        ];
        if let Some((_, what)) = differs.into_iter().find(|(differs, _)| *differs) {
            return Err(format!("shards {first} and {shard} differ in {what}"));
        }
    }
    if !missing.is_empty() && !allow_missing {
        return Err(shard::named(&missing));
    }
    let mut suites: BTreeMap<&str, SuiteRecord> = BTreeMap::new();
    let mut whole = BenchRun {
        shard: None,
        suites: Vec::new(),
        comparison: None,
        ..base.clone()
    };
    whole.conditions.contended.extend(
        missing
            .iter()
            .map(|shard| format!("shard {shard} is missing")),
    );
    for (index, (_, run)) in parts.iter().enumerate() {
        add(&mut whole, run, index == 0);
        for suite in &run.suites {
            let more = |known: &mut SuiteRecord| {
                known.rounds = known.rounds.max(suite.rounds);
                known.entries.extend(suite.entries.iter().cloned());
            };
            suites
                .entry(&suite.name)
                .and_modify(more)
                .or_insert_with(|| suite.clone());
        }
    }
    whole.suites = suites.into_values().collect();
    Ok(whole)
}

/// Adds a shard, without its suites. The whole run begins as a copy of the first shard.
fn add(whole: &mut BenchRun, shard: &BenchRun, is_first: bool) {
    if shard.started < whole.started {
        whole.started.clone_from(&shard.started);
    }
    whole.took_ms = whole.took_ms.max(shard.took_ms);
    for (all, part) in [
        (&mut whole.gate.lost, &shard.gate.lost),
        (&mut whole.gate.redefined, &shard.gate.redefined),
    ] {
        let more: Vec<_> = part.iter().filter(|name| !all.contains(name)).collect();
        all.extend(more.into_iter().cloned());
    }
    if !is_first {
        let conditions = &shard.conditions;
        whole
            .conditions
            .contended
            .extend_from_slice(&conditions.contended);
        whole.conditions.gpu.extend_from_slice(&conditions.gpu);
    }
}

#[cfg(test)]
mod tests;
