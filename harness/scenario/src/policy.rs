//! Recovery policies of `on_oom`: what is done between a failed request and the next try.
//!
//! One enum: a new policy is a variant of [`PolicyWire`] and of [`Policy`], and the matches say where it is missing.

use std::collections::BTreeSet;
use std::fmt;

use schemars::JsonSchema;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::checker::Checker;
use super::metric::BufferName;
use harness_language::error::{Problem, choices, quoted};
use harness_language::located::Located;
use harness_language::text::{CountText, NameText};

/// Most retries that a policy may be given.
pub const MAX_RETRIES: u32 = 100;

/// What is done between a failed request and the next try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Gives the allocator's cache back to the driver, then tries again.
    EmptyCache {
        /// Most tries after the first.
        retries: u32,
    },
    /// Frees these buffers, as far as they are live, then tries once more.
    Free {
        /// What is given up.
        buffers: Vec<BufferName>,
    },
    /// Waits for the whole device, then tries again.
    Synchronize {
        /// Most tries after the first.
        retries: u32,
    },
    /// Drops the failed iteration and tries it again with half the batch.
    HalveBatch {
        /// The smallest batch to try.
        floor: u64,
        /// Most tries after the first, for each iteration.
        retries: u32,
        /// Whether the cache goes back to the driver before each retry.
        empty_cache: bool,
    },
}

impl Policy {
    /// Most tries after the first.
    #[must_use]
    pub const fn retries(&self) -> u32 {
        match self {
            Self::EmptyCache { retries } | Self::Synchronize { retries } | Self::HalveBatch { retries, .. } => *retries,
            Self::Free { .. } => 1,
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EmptyCache { retries } => write!(f, "empty_cache, at most {retries} retries"),
            Self::Free { buffers } => {
                let names: Vec<&str> = buffers.iter().map(BufferName::name).collect();
                write!(f, "free {}", names.join(", "))
            }
            Self::Synchronize { retries } => write!(f, "synchronize, at most {retries} retries"),
            Self::HalveBatch { floor, retries, empty_cache } => {
                let cache = if *empty_cache { ", empty_cache before each" } else { "" };
                write!(f, "halve_batch down to {floor}, at most {retries} retries{cache}")
            }
        }
    }
}

/// What is done when a request fails, before it is tried again.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(rename = "policy", rename_all = "snake_case")]
pub(crate) enum PolicyWire {
    /// Gives the allocator's cache back to the driver, then tries again.
    EmptyCache(RetriesWire),
    /// Frees buffers of the scenario, then tries once more.
    Free(FreeWire),
    /// Waits for the whole device, then tries again.
    Synchronize(RetriesWire),
    /// Drops the failed iteration and tries it again with half the batch, rounded down.
    HalveBatch(HalveBatchWire),
    /// No policy has this name. It is kept, to be answered by the check, which knows the step.
    #[schemars(skip)]
    Unknown(Located<String>),
    /// A map of no policy, or of several.
    #[schemars(skip)]
    NotOne,
}

impl<'de> Deserialize<'de> for PolicyWire {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PolicyVisitor;
        impl<'de> Visitor<'de> for PolicyVisitor {
            type Value = PolicyWire;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a policy, as in `{ empty_cache: {} }`")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let Some(key) = map.next_key::<Located<String>>()? else { return Ok(PolicyWire::NotOne) };
                let policy = match key.value.as_str() {
                    "empty_cache" => PolicyWire::EmptyCache(map.next_value()?),
                    "free" => PolicyWire::Free(map.next_value()?),
                    "synchronize" => PolicyWire::Synchronize(map.next_value()?),
                    "halve_batch" => PolicyWire::HalveBatch(map.next_value()?),
                    _ => {
                        map.next_value::<IgnoredAny>()?;
                        PolicyWire::Unknown(key)
                    }
                };
                let mut is_one = true;
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    is_one = false;
                }
                Ok(if is_one { policy } else { PolicyWire::NotOne })
            }
        }
        deserializer.deserialize_map(PolicyVisitor)
    }
}

/// How often.
#[derive(Clone, Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "policy_retries")]
pub(crate) struct RetriesWire {
    /// Most tries after the first: 1 if not given, at most 100.
    retries: Option<CountText>,
}

/// What is given up.
#[derive(Clone, Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "policy_free")]
pub(crate) struct FreeWire {
    /// Live buffers, in the order in which they are freed. Whether they are live afterwards depends on the run: free them with `free`, which
    /// then skips those that are gone.
    buffers: Vec<NameText>,
}

/// How far down.
#[derive(Clone, Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "policy_halve_batch")]
pub(crate) struct HalveBatchWire {
    /// The smallest batch to try: 1 if not given.
    floor: Option<CountText>,
    /// Most tries after the first, for each iteration: 1 if not given, at most 100.
    retries: Option<CountText>,
    /// Whether the cache goes back to the driver before each retry: no, if not given.
    #[serde(default)]
    empty_cache: bool,
}

/// What a step can recover with.
pub(crate) enum Recoverable {
    /// One request.
    Alloc,
    /// Iterations that start with this batch.
    Train {
        /// Where halving begins.
        batch: u64,
    },
}

impl PolicyWire {
    const fn name(&self) -> &'static str {
        match self {
            Self::EmptyCache(_) => "empty_cache",
            Self::Free(_) => "free",
            Self::Synchronize(_) => "synchronize",
            Self::HalveBatch(_) => "halve_batch",
            Self::Unknown(_) | Self::NotOne => "this",
        }
    }
}

impl Recoverable {
    /// Its key in YAML, and the policies that it can recover with.
    const fn accepts(&self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::Alloc => ("alloc", &["empty_cache", "free", "synchronize"]),
            Self::Train { .. } => ("train", &["empty_cache", "synchronize", "halve_batch"]),
        }
    }
}

/// Checks a policy against the step that has it.
pub(crate) fn check(wire: &Located<PolicyWire>, step: &Recoverable, checker: &mut Checker<'_>) -> Result<Policy, Problem> {
    match (&wire.value, step) {
        (PolicyWire::EmptyCache(fields), _) => Ok(Policy::EmptyCache { retries: retries(fields.retries.as_ref(), checker)? }),
        (PolicyWire::Synchronize(fields), _) => Ok(Policy::Synchronize { retries: retries(fields.retries.as_ref(), checker)? }),
        (PolicyWire::Free(fields), Recoverable::Alloc) => {
            if fields.buffers.is_empty() {
                return Err(Problem::new(wire.position(), "`free` names no buffer").help("as in `free: { buffers: [cache] }`"));
            }
            let (mut buffers, mut seen) = (Vec::new(), BTreeSet::new());
            for name in &fields.buffers {
                let buffer = checker.live_named(name)?;
                if !seen.insert(buffer.index()) {
                    return Err(Problem::new(name.position(), format!("buffer `{buffer}` is named twice")).help("name it once"));
                }
                buffers.push(buffer);
            }
            Ok(Policy::Free { buffers })
        }
        (PolicyWire::HalveBatch(fields), Recoverable::Train { batch }) => {
            let floor = match &fields.floor {
                Some(floor) => checker.whole(floor, "floor", 1..=u64::MAX)?,
                None => 1,
            };
            match &fields.floor {
                Some(given) if floor > *batch => {
                    let message = format!("the floor {floor} is above the batch {batch}: there is nothing to halve");
                    Err(Problem::new(given.position(), message).help(format!("a floor is from 1 to the batch, {batch} here")))
                }
                _ => Ok(Policy::HalveBatch { floor, retries: retries(fields.retries.as_ref(), checker)?, empty_cache: fields.empty_cache }),
            }
        }
        (PolicyWire::Unknown(name), step) => {
            let (_, accepted) = step.accepts();
            Err(Problem::new(name.position(), format!("there is no policy `{}`", name.value)).help(choices(
                &name.value,
                "policies",
                accepted.iter().copied(),
            )))
        }
        (PolicyWire::NotOne, step) => {
            let (_, accepted) = step.accepts();
            Err(Problem::new(wire.position(), "one policy is wanted here").help(format!("one of {}", quoted(accepted, ", "))))
        }
        (PolicyWire::Free(_), Recoverable::Train { .. }) | (PolicyWire::HalveBatch(_), Recoverable::Alloc) => Err(refused(wire, step)),
    }
}

fn refused(wire: &Located<PolicyWire>, step: &Recoverable) -> Problem {
    let (step, accepted) = step.accepts();
    let message = format!("`{}` makes no sense for `{step}`", wire.value.name());
    Problem::new(wire.position(), message).help(format!("`{step}` recovers with {}", quoted(accepted, ", ")))
}

fn retries(given: Option<&CountText>, checker: &Checker<'_>) -> Result<u32, Problem> {
    match given {
        None => Ok(1),
        Some(given) => checker.whole(given, "retries", 1..=u64::from(MAX_RETRIES)).map(|n| n as u32),
    }
}
