//! [`CliError`]: an error that ends a command, with its place in a file and with advice.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use harness_allocator::allocator::caching::ConfError;
use harness_allocator::device::DeviceError;
use harness_base::excerpt::{Excerpt, shortened};
use harness_devices::profile::ProfileError;
use harness_language::arms;
use harness_language::error::FileError;
use harness_report::store::StoreError;
use miette::{Diagnostic, LabeledSpan};

use super::exit::Exit;

#[derive(Debug, thiserror::Error, Diagnostic)]
pub(crate) enum CliError {
    #[error(transparent)]
    #[diagnostic(transparent)]
    Scenario(#[from] FileError),
    #[error(transparent)]
    #[diagnostic(transparent)]
    Profile(#[from] ProfileError),
    /// Any other invalid input.
    #[error("{message}")]
    Input {
        message: String,
        #[help]
        help: String,
    },
    /// Invalid settings of the allocator.
    #[error("{rule}")]
    Conf {
        rule: String,
        // Shared, because a large error makes every `Result` large.
        #[source_code]
        text: Arc<Excerpt>,
        #[label(collection)]
        at: Vec<LabeledSpan>,
        #[help]
        help: String,
    },
    #[error("{error}")]
    Device {
        error: DeviceError,
        #[help]
        help: &'static str,
    },
    /// The message of this error contains the advice.
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("cannot write to {}: {error}", .target.as_ref().map_or_else(|| "standard output".to_owned(), |path| format!("`{}`", path.display())))]
    Output {
        /// `None` for standard output.
        target: Option<PathBuf>,
        error: io::Error,
        #[help]
        help: &'static str,
    },
    /// The machine refuses something that every command needs, or the harness has a bug.
    #[error("{message}")]
    Internal {
        message: String,
        #[help]
        help: &'static str,
    },
}

impl CliError {
    pub(crate) fn input(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self::Input { message: message.into(), help: help.into() }
    }

    /// Invalid settings in `--alloc-conf`.
    pub(crate) fn conf(error: &ConfError, text: &str) -> Self {
        Self::conf_of("--alloc-conf", error, text)
    }

    /// Invalid settings in this option.
    pub(crate) fn conf_of(option: &str, error: &ConfError, text: &str) -> Self {
        let place = (error.offset()..error.offset() + error.length(), "here".to_owned());
        let excerpt = Excerpt::new(option, text, &[place]);
        Self::Conf {
            rule: shortened(&error.rule()).into_owned(),
            at: excerpt.labels().collect(),
            text: Arc::new(excerpt),
            help: arms::advice(error),
        }
    }

    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Scenario(_) | Self::Profile(_) | Self::Input { .. } | Self::Conf { .. } => Exit::Invalid,
            Self::Device { .. } => Exit::Device,
            Self::Store(error) if error.is_of_input() => Exit::Invalid,
            Self::Store(_) | Self::Output { .. } | Self::Internal { .. } => Exit::Internal,
        }
    }
}

impl From<DeviceError> for CliError {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Unavailable { .. } | DeviceError::Driver { .. } | DeviceError::OutOfMemory { .. } => {
                Self::Device { error, help: "see `harness doctor` for the available devices, or use `--device sim`" }
            }
            // Only a wrong call of the device returns the other errors.
            _ => Self::Internal { message: error.to_string(), help: "this is a bug in the harness: report it with the command" },
        }
    }
}

/// All errors of a command; never empty.
#[derive(Debug)]
pub(crate) struct Failures(pub(crate) Vec<CliError>);

impl<E: Into<CliError>> From<E> for Failures {
    fn from(error: E) -> Self {
        Self(vec![error.into()])
    }
}
