//! Compares the snapshots of all ranks of a distributed program: [`overview`].

use std::collections::BTreeMap;

use harness_allocator::units::Bytes;
use serde::Serialize;

use crate::byte_cause::{ByteCause, CauseBytes};
use crate::explanation::Explanation;
use crate::state::MomentKind;

/// Figures within one twentieth of the median count as equal.
const ALIKE: u64 = 20;
const TOLD: usize = 3;

/// One snapshot, or one device of it.
#[derive(Clone, Copy, Debug)]
pub struct ExplainedRank<'a> {
    /// The file name, and the device if the file has several.
    pub name: &'a str,
    pub explanation: &'a Explanation,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Overview {
    pub ranks: Vec<RankRow>,
    /// The names of ranks that explain an OOM. The first failure comes first if times are known.
    pub failed: Vec<String>,
    /// Ranks that differ from most others, largest difference first.
    pub differences: Vec<RankDifference>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankRow {
    pub name: String,
    pub failed: bool,
    pub allocated: Bytes,
    pub reserved: Bytes,
    pub device_total: Bytes,
    pub headline: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankDifference {
    pub rank: String,
    pub cause: ByteCause,
    /// The site, if most of the difference comes from one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub site: Option<String>,
    pub bytes: Bytes,
    pub median: Bytes,
}

impl RankDifference {
    const fn size(&self) -> u64 {
        self.bytes.get().abs_diff(self.median.get())
    }

    pub fn sentence(&self) -> String {
        let Self {
            rank,
            cause,
            site,
            bytes,
            median,
        } = self;
        let site = site
            .as_ref()
            .map_or_else(String::new, |site| format!(", by {site}"));
        let (difference, word) = if bytes > median {
            (*bytes - *median, "more")
        } else {
            (*median - *bytes, "less")
        };
        format!(
            "{rank} has {difference} {word} than the median rank: {bytes} instead of {median} \
             {}{site}.",
            cause.about()
        )
    }
}

/// Compares the ranks. Takes `n log n` time for `n` sites in total.
pub fn overview(ranks: &[ExplainedRank<'_>]) -> Overview {
    let row = |rank: &ExplainedRank<'_>| RankRow {
        name: rank.name.to_owned(),
        failed: has_failed(rank),
        allocated: rank.explanation.accounts.allocated,
        reserved: rank.explanation.accounts.reserved,
        device_total: rank.explanation.device_total,
        headline: rank.explanation.headline.clone(),
    };
    let mut failed: Vec<&ExplainedRank<'_>> =
        ranks.iter().filter(|rank| has_failed(rank)).collect();
    failed.sort_by_key(|rank| rank.explanation.moment.time_us.unwrap_or(u64::MAX));
    Overview {
        ranks: ranks.iter().map(row).collect(),
        failed: failed
            .into_iter()
            .map(|rank| rank.name.to_owned())
            .collect(),
        differences: differences(ranks),
    }
}

fn has_failed(rank: &ExplainedRank<'_>) -> bool {
    rank.explanation.moment.at == MomentKind::Oom
}

/// A cause summed over all sites, or of one site.
type Figure<'a> = (ByteCause, Option<&'a str>);

/// The figures of a rank. Sites are identified by name, which ranks of the same program share.
fn figures<'a>(explanation: &'a Explanation) -> BTreeMap<Figure<'a>, Bytes> {
    let of_cause = |cause: &'a CauseBytes| {
        let sites = cause
            .sites
            .iter()
            .map(|site| ((cause.cause, Some(site.site.as_str())), site.bytes));
        std::iter::once(((cause.cause, None), cause.bytes)).chain(sites)
    };
    explanation.causes.iter().flat_map(of_cause).collect()
}

fn differences(ranks: &[ExplainedRank<'_>]) -> Vec<RankDifference> {
    let of_ranks: Vec<BTreeMap<Figure<'_>, Bytes>> =
        ranks.iter().map(|rank| figures(rank.explanation)).collect();
    let mut all: Vec<Figure<'_>> = of_ranks.iter().flat_map(BTreeMap::keys).copied().collect();
    all.sort_unstable();
    all.dedup();
    let mut differences = Vec::new();
    for (cause, site) in all {
        let bytes_of = |figures: &BTreeMap<Figure<'_>, Bytes>| {
            figures.get(&(cause, site)).copied().unwrap_or_default()
        };
        let mut sorted: Vec<Bytes> = of_ranks.iter().map(bytes_of).collect();
        sorted.sort_unstable();
        let median = sorted[(sorted.len() - 1) / 2];
        for (rank, figures) in ranks.iter().zip(&of_ranks) {
            let difference = RankDifference {
                rank: rank.name.to_owned(),
                cause,
                site: site.map(str::to_owned),
                bytes: bytes_of(figures),
                median,
            };
            let by = difference.size();
            // A difference must be large relative to the figure and to the device.
            if by > median.get() / ALIKE && by > rank.explanation.accounts.reserved.get() / ALIKE {
                differences.push(difference);
            }
        }
    }
    differences.sort_by(|a, b| {
        b.size()
            .cmp(&a.size())
            .then_with(|| (&a.rank, &a.site).cmp(&(&b.rank, &b.site)))
    });
    let mut told: BTreeMap<String, usize> = BTreeMap::new();
    differences.retain(|difference| {
        let count = told.entry(difference.rank.clone()).or_default();
        *count += 1;
        *count <= TOLD
    });
    differences
}
