//! The environment variables with the settings of each allocator, and the one that turns recording
//! on.

use std::env;

use harness_allocator::allocator::Allocator;
use harness_allocator::allocator::bfc::{BfcAllocator, BfcConfig};
use harness_allocator::allocator::caching::{CachingAllocator, ConfError, Config};
use harness_allocator::allocator::rmm_pool::{RmmPool, RmmPoolConfig};
use harness_allocator::units::Bytes;

/// Turns on recording, for snapshots with a history.
const RECORD: &str = "HARNESS_ALLOCATOR_RECORD";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Caching,
    Bfc,
    RmmPool,
}

#[derive(Clone, Debug)]
pub(crate) enum Settings {
    Caching(Config),
    Bfc(BfcConfig),
    RmmPool(RmmPoolConfig),
}

/// An environment variable with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SettingsError {
    #[error("{variable}: {why}")]
    Conf {
        variable: &'static str,
        why: ConfError,
    },
    #[error("{variable}: unknown setting `{item}`: write {accepted}, separated by commas")]
    Item {
        variable: &'static str,
        item: String,
        accepted: &'static str,
    },
    #[error("{RECORD} is `{0}`: set it to `1` or unset it")]
    Record(String),
}

impl Kind {
    pub(crate) const fn variable(self) -> &'static str {
        match self {
            Self::Caching => "HARNESS_ALLOCATOR_CONF",
            Self::Bfc => "HARNESS_BFC_CONF",
            Self::RmmPool => "HARNESS_RMM_POOL_CONF",
        }
    }

    const fn accepted(self) -> &'static str {
        match self {
            Self::Caching => "the settings of PYTORCH_CUDA_ALLOC_CONF",
            Self::Bfc => {
                "`allow_growth:True` or `False`, `garbage_collection:True` or `False`, \
                 `memory_limit_mb:N`"
            }
            Self::RmmPool => "`initial_pool_size_mb:N` and `maximum_pool_size_mb:N`",
        }
    }

    pub(crate) fn settings(self) -> Result<Settings, SettingsError> {
        self.parse(&env::var(self.variable()).unwrap_or_default())
    }

    fn parse(self, text: &str) -> Result<Settings, SettingsError> {
        let variable = self.variable();
        if self == Self::Caching {
            return Config::parse(text)
                .map(Settings::Caching)
                .map_err(|why| SettingsError::Conf { variable, why });
        }
        let (mut bfc, mut rmm) = (BfcConfig::default(), RmmPoolConfig::default());
        for item in text
            .split(',')
            .map(str::trim)
            .filter(|item| !item.is_empty())
        {
            let (key, value) = item
                .split_once(':')
                .map_or((item, ""), |(key, value)| (key.trim(), value.trim()));
            let known = match (self, key) {
                (Self::Bfc, "allow_growth") => truth(value).map(|value| bfc.allow_growth = value),
                (Self::Bfc, "garbage_collection") => {
                    truth(value).map(|value| bfc.garbage_collection = value)
                }
                (Self::Bfc, "memory_limit_mb") => {
                    mebibytes(value).map(|value| bfc.memory_limit = Some(value))
                }
                (Self::RmmPool, "initial_pool_size_mb") => {
                    mebibytes(value).map(|value| rmm.initial_pool_size = Some(value))
                }
                (Self::RmmPool, "maximum_pool_size_mb") => {
                    mebibytes(value).map(|value| rmm.maximum_pool_size = Some(value))
                }
                _ => None,
            };
            known.ok_or_else(|| SettingsError::Item {
                variable,
                item: item.to_owned(),
                accepted: self.accepted(),
            })?;
        }
        Ok(if self == Self::Bfc {
            Settings::Bfc(bfc)
        } else {
            Settings::RmmPool(rmm)
        })
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

pub(crate) fn is_recorded() -> Result<bool, SettingsError> {
    match env::var(RECORD).as_deref() {
        Err(_) | Ok("") => Ok(false),
        Ok("1") => Ok(true),
        Ok(other) => Err(SettingsError::Record(other.to_owned())),
    }
}

/// A boolean as PyTorch spells it.
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
mod tests;
