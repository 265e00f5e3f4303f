//! Several snapshots together, as those of all ranks of a distributed program: which failed, and where they differ. [`overview`].

use std::collections::BTreeMap;

use harness_allocator::units::Bytes;
use serde::Serialize;

use crate::bytes::ByteCause;
use crate::explanation::Explanation;
use crate::state::MomentKind;

/// Ranks whose figures lie within this part of the median, one twentieth, are alike.
const ALIKE: u64 = 20;
/// How many differences are told of each rank.
const TOLD: usize = 3;

/// One snapshot, or one device of it.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Rank<'a> {
    /// The name of the file, and the device where the file has several.
    pub name: &'a str,
    pub explanation: &'a Explanation,
}

/// What all ranks say together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Overview {
    /// In the order given.
    pub ranks: Vec<RankRow>,
    /// The ranks at whose moment a request was refused, by name. The first to fail stands first, where the times are known.
    pub failed: Vec<String>,
    /// Ranks that differ from most, the largest difference first.
    pub differences: Vec<Difference>,
}

/// The figures of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct RankRow {
    pub name: String,
    pub failed: bool,
    pub allocated: Bytes,
    pub reserved: Bytes,
    pub device_total: Bytes,
    pub headline: String,
}

/// A figure in which a rank differs from the median of all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Difference {
    pub rank: String,
    pub cause: ByteCause,
    /// Where, if it is of one site more than of others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub site: Option<String>,
    /// What this rank has.
    pub bytes: Bytes,
    /// What the median rank has.
    pub median: Bytes,
}

impl Difference {
    /// As a sentence.
    #[must_use]
    pub fn sentence(&self) -> String {
        let Self { rank, cause, site, bytes, median } = self;
        let site = site.as_ref().map_or_else(String::new, |site| format!(", by {site}"));
        let (difference, word) = if bytes > median { (*bytes - *median, "more") } else { (*median - *bytes, "less") };
        format!("{rank} has {difference} {word} than the median rank: {bytes} instead of {median} {}{site}.", cause.about())
    }
}

/// Compares the ranks. Takes `n log n` time for `n` sites of all of them.
#[must_use]
pub fn overview(ranks: &[Rank<'_>]) -> Overview {
    let row = |rank: &Rank<'_>| RankRow {
        name: rank.name.to_owned(),
        failed: has_failed(rank),
        allocated: rank.explanation.accounts.allocated,
        reserved: rank.explanation.accounts.reserved,
        device_total: rank.explanation.device_total,
        headline: rank.explanation.headline.clone(),
    };
    let mut failed: Vec<&Rank<'_>> = ranks.iter().filter(|rank| has_failed(rank)).collect();
    failed.sort_by_key(|rank| rank.explanation.moment.time_us.unwrap_or(u64::MAX));
    Overview {
        ranks: ranks.iter().map(row).collect(),
        failed: failed.into_iter().map(|rank| rank.name.to_owned()).collect(),
        differences: differences(ranks),
    }
}

fn has_failed(rank: &Rank<'_>) -> bool {
    rank.explanation.moment.at == MomentKind::Oom
}

/// A cause of all sites together, or of one site.
type Figure<'a> = (ByteCause, Option<&'a str>);

/// The figures of a rank: sites by their names, which are the same on all ranks that run the same program.
fn figures<'a>(explanation: &'a Explanation) -> BTreeMap<Figure<'a>, Bytes> {
    let of_cause = |cause: &'a crate::bytes::CauseBytes| {
        let sites = cause.sites.iter().map(|site| ((cause.cause, Some(site.site.as_str())), site.bytes));
        std::iter::once(((cause.cause, None), cause.bytes)).chain(sites)
    };
    explanation.causes.iter().flat_map(of_cause).collect()
}

fn differences(ranks: &[Rank<'_>]) -> Vec<Difference> {
    let of_ranks: Vec<BTreeMap<Figure<'_>, Bytes>> = ranks.iter().map(|rank| figures(rank.explanation)).collect();
    let mut all: Vec<Figure<'_>> = of_ranks.iter().flat_map(BTreeMap::keys).copied().collect();
    all.sort_unstable();
    all.dedup();
    let mut differences: Vec<(u64, Difference)> = Vec::new();
    for (cause, site) in all {
        let bytes_of = |figures: &BTreeMap<Figure<'_>, Bytes>| figures.get(&(cause, site)).copied().unwrap_or_default();
        let mut sorted: Vec<Bytes> = of_ranks.iter().map(bytes_of).collect();
        sorted.sort_unstable();
        let median = sorted[(sorted.len() - 1) / 2];
        for (rank, figures) in ranks.iter().zip(&of_ranks) {
            let bytes = bytes_of(figures);
            let by = bytes.get().abs_diff(median.get());
            // A difference is worth telling if it is one of the figure and of the whole device.
            if by > median.get() / ALIKE && by > rank.explanation.accounts.reserved.get() / ALIKE {
                let site = site.map(str::to_owned);
                differences.push((by, Difference { rank: rank.name.to_owned(), cause, site, bytes, median }));
            }
        }
    }
    differences.sort_by(|(a, left), (b, right)| b.cmp(a).then_with(|| left.rank.cmp(&right.rank)).then_with(|| left.site.cmp(&right.site)));
    let mut told: BTreeMap<String, usize> = BTreeMap::new();
    let is_told = |difference: &Difference| {
        let count = told.entry(difference.rank.clone()).or_default();
        *count += 1;
        *count <= TOLD
    };
    let mut is_told = is_told;
    differences.into_iter().map(|(_, difference)| difference).filter(|difference| is_told(difference)).collect()
}
