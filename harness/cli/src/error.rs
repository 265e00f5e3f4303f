//! What ends a command early: [`CliError`], shown with the place in the file where it has one, and with what to do.

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

/// Why a command cannot do what it was asked for.
#[derive(Debug, thiserror::Error, Diagnostic)]
pub(crate) enum CliError {
    /// A scenario is not valid: correct it at the place shown.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Scenario(#[from] FileError),
    /// A device profile is not valid: correct it at the place shown.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Profile(#[from] ProfileError),
    /// Something else that the user gave is not valid.
    #[error("{message}")]
    Input {
        /// What is wrong with it.
        message: String,
        /// What the user may do about it.
        #[help]
        help: String,
    },
    /// Settings of the allocator are not valid: correct them at the place shown.
    #[error("{rule}")]
    Conf {
        /// What is wrong, and what would be right.
        rule: String,
        /// The settings. Apart, because the error travels through every result.
        #[source_code]
        text: Arc<Excerpt>,
        /// The place in the text.
        #[label(collection)]
        at: Vec<LabeledSpan>,
        /// What the user may do about it.
        #[help]
        help: String,
    },
    /// The device cannot be used.
    #[error("{error}")]
    Device {
        /// The reason, as the system or the device gives it.
        error: DeviceError,
        /// What the user may do about it.
        #[help]
        help: &'static str,
    },
    /// A report cannot be written, or what it is made of cannot be read; its sentence says what to do.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A file, or standard output, cannot be written.
    #[error("cannot write to {}: {error}", .target.as_ref().map_or_else(|| "standard output".to_owned(), |path| format!("`{}`", path.display())))]
    Output {
        /// The file; `None` for standard output.
        target: Option<PathBuf>,
        /// The reason, as the system or the device gives it.
        error: io::Error,
        /// What the user may do about it.
        #[help]
        help: &'static str,
    },
    /// Something that the machine should be able to do, and this program cannot go on without.
    #[error("{message}")]
    Internal {
        /// What failed, in one sentence.
        message: String,
        /// What the user may do about it.
        #[help]
        help: &'static str,
    },
}

impl CliError {
    /// An input that is not valid.
    pub(crate) fn input(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self::Input { message: message.into(), help: help.into() }
    }

    /// Settings given as `--alloc-conf text`.
    pub(crate) fn conf(error: &ConfError, text: &str) -> Self {
        Self::conf_of("--alloc-conf", error, text)
    }

    /// Settings given by this option.
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

    /// How the command ends because of it.
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
                Self::Device { error, help: "see `harness doctor` for what is there, or use `--device sim`" }
            }
            // Only a mistaken caller sees these.
            _ => Self::Internal { message: error.to_string(), help: "this is a mistake in the harness: report it with the command" },
        }
    }
}

/// Everything that was found wrong; never empty.
#[derive(Debug)]
pub(crate) struct Failures(pub(crate) Vec<CliError>);

impl<E: Into<CliError>> From<E> for Failures {
    fn from(error: E) -> Self {
        Self(vec![error.into()])
    }
}
