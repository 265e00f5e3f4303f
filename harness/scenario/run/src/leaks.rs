//! Leak detection: growth by site, from iteration to iteration or since a measure. A site's memory
//! fluctuates if batches differ in size or the cache is emptied. So the check compares each site's
//! minimum over the first half of the iterations with its minimum over the second half. A leak
//! raises the minimum by a constant amount per iteration; fluctuation does not.

use harness_allocator::units::Bytes;
use harness_base::words::count;

use crate::step_result::{StepResult, Unmet};
use crate::{context::RunContext, rig::Stop};
use harness_record::Table;
use harness_scenario::{MeasureName, Position, ReportKey, steps::leaks::LeakCheck};

/// The number of intervals whose minimum is kept. Longer loops use longer intervals, so memory use
/// stays bounded.
const MOST_STRETCHES: usize = 128;
/// The number of sites that a finding names.
const MOST_NAMED: usize = 3;
/// The number of sites that a table lists.
const MOST_ROWS: usize = 10;

/// Tracks each site's memory over the iterations of one loop or training.
#[derive(Clone, Debug)]
pub(crate) struct Watch {
    check: LeakCheck,
    at: Position,
    iterations: u64,
    lows: Lows,
    /// Each site's bytes at the end of the warm-up and in the last sample.
    first: Vec<u64>,
    last: Vec<u64>,
}

/// Each site's minimum per interval. Sites that appear later held nothing before.
#[derive(Clone, Debug)]
struct Lows {
    /// Samples per interval.
    length: u64,
    stretches: Vec<Vec<u64>>,
    /// Samples in the last interval.
    looks: u64,
}

impl Lows {
    const fn new() -> Self {
        Self {
            length: 1,
            stretches: Vec::new(),
            looks: 0,
        }
    }

    fn add(&mut self, held: &[u64]) {
        if self.looks == self.length || self.stretches.is_empty() {
            if self.stretches.len() == MOST_STRETCHES {
                self.stretches = self
                    .stretches
                    .chunks(2)
                    .map(|two| {
                        two.iter()
                            .skip(1)
                            .fold(two[0].clone(), |low, next| least(&low, next))
                    })
                    .collect();
                self.length *= 2;
            }
            self.stretches.push(held.to_vec());
            self.looks = 1;
        } else if let Some(stretch) = self.stretches.last_mut() {
            *stretch = least(stretch, held);
            self.looks += 1;
        }
    }

    /// Each site's growth of the minimum, and the number of samples it took. `None`: there are too
    /// few samples.
    fn growth(&self, sites: usize) -> Option<(Vec<i128>, u64)> {
        let whole = self
            .stretches
            .len()
            .saturating_sub(usize::from(self.looks < self.length));
        let half = whole / 2;
        let stretches = self
            .stretches
            .get(whole - 2 * half..whole)
            .filter(|_| half > 0)?;
        let (first, second) = stretches.split_at(half);
        let low = |half: &[Vec<u64>], site: usize| {
            half.iter()
                .map(|held| held.get(site).copied().unwrap_or(0))
                .min()
                .unwrap_or(0)
        };
        let growth =
            (0..sites).map(|site| i128::from(low(second, site)) - i128::from(low(first, site)));
        Some((growth.collect(), half as u64 * self.length))
    }
}

fn least(one: &[u64], other: &[u64]) -> Vec<u64> {
    one.iter()
        .zip(other)
        .map(|(one, other)| *one.min(other))
        .collect()
}

struct Growing {
    name: String,
    first: Bytes,
    last: Bytes,
    /// Per iteration, rounded to whole bytes; for a comparison with a measure, in total.
    growth: Bytes,
    violates: bool,
}

impl Watch {
    /// Starts before the first iteration. `None` if there is no check, or if sites are not tracked.
    pub(crate) fn begin(ctx: &RunContext, check: Option<&LeakCheck>, at: Position) -> Option<Self> {
        ctx.rig.site_bytes()?;
        let check = check?.clone();
        Some(Self {
            check,
            at,
            iterations: 0,
            lows: Lows::new(),
            first: Vec::new(),
            last: Vec::new(),
        })
    }

    pub(crate) fn iteration_ended(&mut self, ctx: &RunContext) {
        self.iterations += 1;
        let Some(since_warmup) = self.iterations.checked_sub(self.check.warmup) else {
            return;
        };
        if since_warmup.is_multiple_of(self.check.every)
            && let Some(held) = ctx.rig.site_bytes()
        {
            if self.lows.stretches.is_empty() {
                self.first = held.to_vec();
            }
            self.last = held.to_vec();
            self.lows.add(held);
        }
    }

    pub(crate) fn judge(&self, ctx: &mut RunContext) -> Result<StepResult, Stop> {
        let Some((growth, looks)) = self.lows.growth(self.last.len()) else {
            let ended = count(self.iterations, "iteration");
            let note = format!(
                "leaks were not checked: only {ended} ended, with a warm-up of {}",
                self.check.warmup
            );
            return Ok(StepResult::with_note(note));
        };
        let iterations = looks * self.check.every;
        let names: Vec<String> = ctx.rig.sites().iter().map(ToString::to_string).collect();
        let site = |(number, growth): (usize, i128)| {
            let first = self.first.get(number).copied().unwrap_or(0);
            let (last, grown) = (
                self.last[number],
                u64::try_from(growth).ok().filter(|grown| *grown > 0)?,
            );
            let too_fast = self.check.per_iteration.is_some_and(|most| {
                u128::from(grown) > u128::from(most.0) * u128::from(iterations)
            });
            let too_much = self
                .check
                .total
                .is_some_and(|most| last.saturating_sub(first) > most.0);
            Some(Growing {
                name: names.get(number).cloned().unwrap_or_default(),
                first: Bytes(first),
                last: Bytes(last),
                growth: Bytes((grown + iterations / 2) / iterations),
                violates: too_fast || too_much,
            })
        };
        let mut growing: Vec<Growing> = growth.into_iter().enumerate().filter_map(site).collect();
        let checked = format!(
            "in {} after a warm-up of {}",
            count(self.iterations - self.check.warmup, "iteration"),
            self.check.warmup
        );
        if growing.is_empty() {
            return Ok(StepResult::with_note(format!("no site grows {checked}")));
        }
        let columns = ["site", "after the warm-up", "at the end", "per iteration"];
        let table = table(
            &format!("Sites that grow, {checked}"),
            columns,
            &mut growing,
        );
        let mut found = StepResult {
            tables: vec![table],
            ..StepResult::default()
        };
        let violating: Vec<&Growing> = growing.iter().filter(|site| site.violates).collect();
        if !violating.is_empty() {
            let seen = format!("{}; {}", named(&violating), time_left(ctx, &growing)?);
            found.unmet.push(Unmet {
                at: self.at,
                expected: self.expected(),
                seen,
            });
        }
        Ok(found)
    }

    fn expected(&self) -> String {
        let per_iteration = self
            .check
            .per_iteration
            .map(|most| format!("{most} per iteration"));
        let total = self.check.total.map(|most| format!("{most} in total"));
        let most: Vec<String> = per_iteration.into_iter().chain(total).collect();
        format!(
            "no site to grow by more than {}, after a warm-up of {}",
            most.join(" or "),
            count(self.check.warmup, "iteration")
        )
    }
}

/// Sorts the sites, and returns a table of those that grow fastest.
fn table(title: &str, columns: [&str; 4], sites: &mut [Growing]) -> Table {
    sites.sort_by(|one, other| {
        other
            .growth
            .cmp(&one.growth)
            .then_with(|| one.name.cmp(&other.name))
    });
    let unlisted = if sites.len() > MOST_ROWS {
        format!(", the first {MOST_ROWS} of {}", sites.len())
    } else {
        String::new()
    };
    let row = |site: &Growing| {
        vec![
            site.name.clone(),
            site.first.to_string(),
            site.last.to_string(),
            site.growth.to_string(),
        ]
    };
    let rows = sites.iter().take(MOST_ROWS).map(row).collect();
    Table {
        title: format!("{title}{unlisted}"),
        columns: columns.map(str::to_owned).to_vec(),
        rows,
    }
}

fn named(sites: &[&Growing]) -> String {
    let one = |site: &&Growing| {
        format!(
            "{} grows by {} per iteration, from {} to {}",
            site.name, site.growth, site.first, site.last
        )
    };
    let mut words: Vec<String> = sites.iter().take(MOST_NAMED).map(one).collect();
    if sites.len() > MOST_NAMED {
        words.push(format!("{} more", sites.len() - MOST_NAMED));
    }
    words.join(", ")
}

/// Estimates when memory runs out at this rate, given the memory that is free on the device and in
/// the allocator's cache.
fn time_left(ctx: &mut RunContext, growing: &[Growing]) -> Result<String, Stop> {
    let rate: Bytes = growing.iter().map(|site| site.growth).sum();
    let now = ctx.readings(true)?;
    let cached = now
        .stats
        .reserved_bytes
        .all
        .current
        .saturating_sub(now.stats.allocated_bytes.all.current);
    let Some(free) = now
        .memory
        .map(|memory| Bytes(memory.free.0 + cached))
        .filter(|_| rate.0 > 0)
    else {
        return Ok("that is less than one byte per iteration".to_owned());
    };
    Ok(match free.0 / rate.0 {
        0 => format!("at {rate} per iteration, no memory is left for another iteration"),
        more => format!(
            "at {rate} per iteration, memory runs out after at most {}",
            count(more, "more iteration")
        ),
    })
}

/// A table of the sites that have grown since a measure; empty in a timed run.
pub(crate) fn compare(ctx: &RunContext, since: &MeasureName) -> StepResult {
    let Some(now) = ctx.rig.site_bytes() else {
        return StepResult::default();
    };
    let before = ctx
        .values
        .sites_at
        .get(since)
        .map_or(&[][..], Vec::as_slice);
    let sites = ctx
        .rig
        .sites()
        .into_iter()
        .zip(now)
        .enumerate()
        .map(|(number, (site, &last))| {
            let first = before.get(number).copied().unwrap_or(0);
            let growth = Bytes(last.saturating_sub(first));
            Growing {
                name: site.to_string(),
                first: Bytes(first),
                last: Bytes(last),
                growth,
                violates: false,
            }
        });
    let mut grown: Vec<Growing> = sites.filter(|site| site.growth > Bytes::ZERO).collect();
    let bytes = grown.iter().map(|site| site.growth.0).sum();
    let mut result = StepResult::default();
    result.reports.extend([
        (ReportKey::GrownBytes, bytes),
        (ReportKey::GrownSites, grown.len() as u64),
    ]);
    if grown.is_empty() {
        result
            .notes
            .push(format!("no site holds more than at {since}"));
        return result;
    }
    let title = format!("Sites that hold more than at {since}");
    result
        .tables
        .push(table(&title, ["site", "then", "now", "growth"], &mut grown));
    result
}

#[cfg(test)]
mod tests;
