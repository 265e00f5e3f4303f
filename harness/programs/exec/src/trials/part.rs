//! [`Part`]: which cases of a run a report has.

use harness_base::shard::Shard;
use serde::{Deserialize, Serialize};

/// The shard of a report, and the names of all cases in order, also those of other shards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    pub shard: Shard,
    pub names: Vec<String>,
}
