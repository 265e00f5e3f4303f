//! The memory of a process besides its allocations: of its CUDA context, and of the libraries that
//! it uses.

use std::{fmt, str::FromStr};

use harness_allocator::units::Bytes;

use crate::settings::{Settings, SettingsError};

/// `--context-overhead`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContextOverhead {
    /// From the start, for the context and all libraries together.
    Size(Bytes),
    /// The context, and later each [`LibraryContext`] of the libraries, as on an H200.
    H200,
}

/// A part of NVIDIA's libraries that takes memory at its first use in a process. An H200 with
/// driver 580 and PyTorch 2.11 used 527 MiB for the context, 595 MiB after the first product in
/// float32, 685 MiB after one in float16, 693 MiB after a convolution and 799 MiB after a
/// decomposition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LibraryContext {
    Cublas,
    /// The code for products of 16-bit numbers.
    CublasHalf,
    Cudnn,
    Cusolver,
}

const CONTEXT: Bytes = Bytes::mib(527);
const NAME: &str = "h200";

impl LibraryContext {
    const ALL: [Self; 4] = [Self::Cublas, Self::CublasHalf, Self::Cudnn, Self::Cusolver];

    pub const fn memory(self) -> Bytes {
        Bytes::mib(match self {
            Self::Cublas => 595 - 527,
            Self::CublasHalf => 685 - 595,
            Self::Cudnn => 693 - 685,
            Self::Cusolver => 799 - 693,
        })
    }
}

impl ContextOverhead {
    /// The memory before the first allocation.
    pub const fn of_context(self) -> Bytes {
        match self {
            Self::Size(size) => size,
            Self::H200 => CONTEXT,
        }
    }

    /// The memory with all libraries that were measured.
    pub fn with_libraries(self) -> Bytes {
        match self {
            Self::Size(size) => size,
            Self::H200 => LibraryContext::ALL
                .into_iter()
                .fold(CONTEXT, |sum, part| sum + part.memory()),
        }
    }

    #[must_use]
    pub fn applied_to(self, settings: Settings) -> Settings {
        Settings {
            context_overhead: self.of_context(),
            memory_of_libraries: self == Self::H200,
            ..settings
        }
    }
}

impl fmt::Display for ContextOverhead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size(size) => write!(f, "{}B", size.0),
            Self::H200 => f.write_str(NAME),
        }
    }
}

impl FromStr for ContextOverhead {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        match text {
            NAME => Ok(Self::H200),
            _ => Bytes::parse(text)
                .map(Self::Size)
                .map_err(|error| SettingsError(format!("{error}, or `{NAME}`"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_add_up_to_the_measured_memory() {
        assert_eq!(ContextOverhead::H200.with_libraries(), Bytes::mib(799));
    }

    #[test]
    fn a_size_and_the_name_are_accepted() {
        for text in ["718274560B", NAME] {
            assert_eq!(
                text.parse::<ContextOverhead>()
                    .map(|overhead| overhead.to_string()),
                Ok(text.to_owned())
            );
        }
        assert_eq!("685MiB".parse(), Ok(ContextOverhead::Size(Bytes::mib(685))));
        assert!(
            "h201"
                .parse::<ContextOverhead>()
                .is_err_and(|error| error.to_string().ends_with(", or `h200`"))
        );
    }
}
