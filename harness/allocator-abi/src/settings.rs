//! What the environment says: which settings each allocator has, and whether it is recorded.

use std::env;

use harness_allocator::allocator::Allocator;
use harness_allocator::allocator::bfc::{BfcAllocator, BfcConfig};
use harness_allocator::allocator::caching::{CachingAllocator, ConfError, Config};
use harness_allocator::allocator::rmm_pool::{RmmPool, RmmPoolConfig};
use harness_allocator::units::Bytes;

/// Whether allocators are recorded, for snapshots with a history.
const RECORD: &str = "HARNESS_ALLOCATOR_RECORD";

/// The allocators of this library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Caching,
    Bfc,
    RmmPool,
}

/// An allocator and its settings.
#[derive(Clone, Debug)]
pub(crate) enum Settings {
    Caching(Config),
    Bfc(BfcConfig),
    RmmPool(RmmPoolConfig),
}

/// A variable that cannot be understood. Correct it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SettingsError {
    #[error("{variable}: {why}")]
    Conf { variable: &'static str, why: ConfError },
    #[error("{variable}: `{item}` is not understood: settings are {accepted}, with commas between them")]
    Item { variable: &'static str, item: String, accepted: &'static str },
    #[error("{RECORD} is `1` or not set, and not `{0}`")]
    Record(String),
}

impl Kind {
    /// The variable with its settings.
    pub(crate) const fn variable(self) -> &'static str {
        match self {
            Self::Caching => "HARNESS_ALLOCATOR_CONF",
            Self::Bfc => "HARNESS_BFC_CONF",
            Self::RmmPool => "HARNESS_RMM_POOL_CONF",
        }
    }

    const fn accepted(self) -> &'static str {
        match self {
            Self::Caching => "those of PYTORCH_CUDA_ALLOC_CONF",
            Self::Bfc => "`allow_growth:True` or `False`, `garbage_collection:True` or `False`, `memory_limit_mb:N`",
            Self::RmmPool => "`initial_pool_size_mb:N` and `maximum_pool_size_mb:N`",
        }
    }

    /// Its settings in the environment.
    pub(crate) fn settings(self) -> Result<Settings, SettingsError> {
        self.parse(&env::var(self.variable()).unwrap_or_default())
    }

    fn parse(self, text: &str) -> Result<Settings, SettingsError> {
        let variable = self.variable();
        if self == Self::Caching {
            return Config::parse(text).map(Settings::Caching).map_err(|why| SettingsError::Conf { variable, why });
        }
        let (mut bfc, mut rmm) = (BfcConfig::default(), RmmPoolConfig::default());
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let (key, value) = item.split_once(':').map_or((item, ""), |(key, value)| (key.trim(), value.trim()));
            let understood = match (self, key) {
                (Self::Bfc, "allow_growth") => truth(value).map(|value| bfc.allow_growth = value),
                (Self::Bfc, "garbage_collection") => truth(value).map(|value| bfc.garbage_collection = value),
                (Self::Bfc, "memory_limit_mb") => mebibytes(value).map(|value| bfc.memory_limit = Some(value)),
                (Self::RmmPool, "initial_pool_size_mb") => mebibytes(value).map(|value| rmm.initial_pool_size = Some(value)),
                (Self::RmmPool, "maximum_pool_size_mb") => mebibytes(value).map(|value| rmm.maximum_pool_size = Some(value)),
                _ => None,
            };
            understood.ok_or_else(|| SettingsError::Item { variable, item: item.to_owned(), accepted: self.accepted() })?;
        }
        Ok(if self == Self::Bfc { Settings::Bfc(bfc) } else { Settings::RmmPool(rmm) })
    }
}

impl Settings {
    pub(crate) fn build(self) -> Box<dyn Allocator> {
        match self {
            Self::Caching(config) => Box::new(CachingAllocator::new(config)),
            Self::Bfc(config) => Box::new(BfcAllocator::new(config)),
            Self::RmmPool(config) => Box::new(RmmPool::new(config)),
        }
    }
}

/// Whether allocators are to be recorded.
pub(crate) fn is_recorded() -> Result<bool, SettingsError> {
    match env::var(RECORD).as_deref() {
        Err(_) | Ok("") => Ok(false),
        Ok("1") => Ok(true),
        Ok(other) => Err(SettingsError::Record(other.to_owned())),
    }
}

/// As PyTorch writes it.
fn truth(value: &str) -> Option<bool> {
    match value {
        "True" => Some(true),
        "False" => Some(false),
        _ => None,
    }
}

fn mebibytes(value: &str) -> Option<Bytes> {
    Some(Bytes(value.parse::<u64>().ok()?.checked_mul(1 << 20)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_allocator_reads_its_own_settings() {
        let Ok(Settings::Bfc(bfc)) = Kind::Bfc.parse("allow_growth:False, memory_limit_mb:512") else { panic!("these are settings") };
        assert_eq!(bfc, BfcConfig { allow_growth: false, memory_limit: Some(Bytes::mib(512)), garbage_collection: true });
        let Ok(Settings::RmmPool(rmm)) = Kind::RmmPool.parse("initial_pool_size_mb:64,maximum_pool_size_mb:128,") else {
            panic!("these too")
        };
        assert_eq!(rmm, RmmPoolConfig { initial_pool_size: Some(Bytes::mib(64)), maximum_pool_size: Some(Bytes::mib(128)) });
        let Ok(Settings::Caching(config)) = Kind::Caching.parse("max_split_size_mb:64") else { panic!("and these") };
        assert_eq!(config.to_string(), "max_split_size_mb:64");
    }

    #[test]
    fn a_setting_that_is_none_is_refused_with_those_that_there_are() {
        let refusal = |kind: Kind, text: &str| kind.parse(text).expect_err(text).to_string();
        assert_eq!(
            refusal(Kind::Bfc, "allow_growth:true"),
            "HARNESS_BFC_CONF: `allow_growth:true` is not understood: settings are `allow_growth:True` or `False`, `garbage_collection:True` or \
             `False`, `memory_limit_mb:N`, with commas between them"
        );
        assert!(refusal(Kind::RmmPool, "initial_pool_size:1GiB").starts_with("HARNESS_RMM_POOL_CONF: `initial_pool_size:1GiB` is not"));
        assert!(refusal(Kind::Caching, "max_split:1").starts_with("HARNESS_ALLOCATOR_CONF: "));
    }
}
