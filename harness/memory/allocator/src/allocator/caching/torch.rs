//! The versions of PyTorch whose allocators differ.

use std::str::FromStr;

use crate::allocator::blocks::TieOrder;
use crate::{device::DeviceError, named::named_enum};

named_enum! {
    /// A version of PyTorch. 2.13, 2.14 and 2.15 differ only in their settings.
    #[derive(Default)]
    TorchVersion {
        V2_4 = "2.4",
        V2_5 = "2.5",
        V2_6 = "2.6",
        V2_7 = "2.7",
        V2_8 = "2.8",
        V2_9 = "2.9",
        V2_10 = "2.10",
        V2_11 = "2.11",
        V2_12 = "2.12",
        V2_13 = "2.13",
        V2_14 = "2.14",
        #[default]
        V2_15 = "2.15",
    }
}

impl TorchVersion {
    /// Returns true if `text` names this version. Otherwise [`FromStr`] has chosen it as the
    /// nearest one.
    pub fn covers(self, text: &str) -> bool {
        release(text).is_some_and(|(major, minor)| self.name() == format!("{major}.{minor}"))
    }

    /// The order of free blocks of one size (pytorch#178362, pytorch#183591).
    pub const fn ties(self) -> TieOrder {
        match self {
            Self::V2_12 => TieOrder::Block,
            Self::V2_13 | Self::V2_14 | Self::V2_15 => TieOrder::Segment,
            _ => TieOrder::Address,
        }
    }

    /// The variables with the allocator's settings. The first one that is set counts, even if it is
    /// empty; the others then have no effect.
    pub fn settings_variables(self) -> &'static [&'static str] {
        if self < Self::V2_10 {
            &["PYTORCH_CUDA_ALLOC_CONF"]
        } else {
            &[
                "PYTORCH_CUDA_ALLOC_CONF",
                "PYTORCH_HIP_ALLOC_CONF",
                "PYTORCH_ALLOC_CONF",
            ]
        }
    }

    /// Returns true if an open context of a private pool counts as a graph capture (until
    /// pytorch#181830): no event is queried, cached memory stays, and no pool can be released.
    pub fn contexts_are_captures(self) -> bool {
        self < Self::V2_13
    }

    /// Returns true if `empty_cache` in a context fails in an assertion.
    pub(super) fn asserts_on_empty_cache_in_context(self) -> bool {
        self < Self::V2_6
    }

    /// Returns true if `empty_cache` in a context releases nothing. PyTorch then releases memory of
    /// the context's pool only, and only if its owner has released that pool, which is impossible
    /// here.
    pub(super) fn keeps_all_in_context(self) -> bool {
        matches!(self, Self::V2_6 | Self::V2_7)
    }

    /// Returns true if the memory of a private pool is never released.
    pub(super) fn keeps_released_pools(self) -> bool {
        self == Self::V2_5
    }

    /// Returns true if private pools have no expandable segments.
    pub(super) fn expands_only_default_pools(self) -> bool {
        self == Self::V2_4
    }

    /// Returns true if a request of a private pool for an expandable segment is an error
    /// (pytorch#148378).
    pub(super) fn refuses_expandable_pools(self) -> bool {
        self == Self::V2_7
    }

    /// Returns true if garbage collection and the release of oversize blocks also take blocks of
    /// expandable segments, which fails in an assertion (until pytorch#134338).
    pub(super) fn asserts_on_release_of_expandable(self) -> bool {
        self == Self::V2_4
    }

    /// Returns true if the outermost of several contexts serves requests, instead of the innermost
    /// (until pytorch#161193).
    pub fn first_context_serves(self) -> bool {
        self < Self::V2_10
    }

    /// Returns true if a memory fraction of 1 is a limit equal to the total memory (until
    /// pytorch#161035).
    pub fn whole_fraction_limits(self) -> bool {
        self < Self::V2_10
    }

    /// Returns true if `>` in a list of `roundup_power2_divisions` also sets the last listed
    /// interval (until pytorch#165135).
    pub(super) fn rest_includes_last_interval(self) -> bool {
        self < Self::V2_10
    }

    /// The smallest value of `max_split_size_mb` and `max_non_split_rounding_mb`, where it does not
    /// depend on the segment size.
    pub(super) fn least_split_size(self) -> Option<u64> {
        (self < Self::V2_10).then_some(21)
    }
}

/// The error of an operation that a version of PyTorch does not support. `does` continues the
/// sentence "PyTorch 2.7 …".
pub(super) fn unsupported(torch: TorchVersion, what: &str, does: &str) -> DeviceError {
    DeviceError::Unavailable {
        what: what.to_owned(),
        why: format!("PyTorch {torch} {does}; choose another version or other settings"),
    }
}

/// The text is not a version of PyTorch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a version of PyTorch: write 2.4 to 2.15, such as 2.9 or 2.9.1")]
pub struct TorchVersionError(String);

impl FromStr for TorchVersion {
    type Err = TorchVersionError;

    /// Parses a release such as `2.9`, `2.9.1` or `2.15.0+cu130`. A version out of range becomes
    /// the nearest one; compare with [`TorchVersion::covers`].
    fn from_str(text: &str) -> Result<Self, TorchVersionError> {
        let (major, minor) = release(text).ok_or_else(|| TorchVersionError(text.to_owned()))?;
        let minor = match major {
            0..=1 => 0,
            2 => minor,
            _ => u64::MAX,
        };
        let index = usize::try_from(minor.saturating_sub(4))
            .unwrap_or(usize::MAX)
            .min(Self::ALL.len() - 1);
        Ok(Self::ALL[index])
    }
}

fn release(text: &str) -> Option<(u64, u64)> {
    let mut parts = text.split('+').next()?.split('.');
    let (major, minor) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    Some((major, minor))
}

#[cfg(test)]
mod tests;
