use std::{io, path::Path, sync::Arc};

use harness_allocator::{allocator::caching::ConfError, device::DeviceError};
use harness_base::excerpt::{Excerpt, shortened};
use harness_exec::{launch::LaunchError, setup::SetupError, trials::runner::RunnerError};
use harness_language::{arms, error::FileError};
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
    Setup(#[from] SetupError),
    #[error(transparent)]
    #[diagnostic(transparent)]
    Program(#[from] RunnerError),
    #[error("{message}")]
    Other {
        message: String,
        #[help]
        help: String,
        exit: Exit,
    },
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
    /// The message of this error contains the advice.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl CliError {
    fn other(message: String, help: impl Into<String>, exit: Exit) -> Self {
        Self::Other {
            message,
            help: help.into(),
            exit,
        }
    }

    pub(crate) fn input(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self::other(message.into(), help, Exit::Invalid)
    }

    pub(crate) fn device(error: &DeviceError, help: &str) -> Self {
        Self::other(error.to_string(), help, Exit::Device)
    }

    pub(crate) fn internal(message: impl Into<String>, help: &str) -> Self {
        Self::other(message.into(), help, Exit::Internal)
    }

    pub(crate) fn output(target: Option<&Path>, error: &io::Error, help: &str) -> Self {
        let target = target.map_or_else(
            || "standard output".to_owned(),
            |path| format!("`{}`", path.display()),
        );
        Self::internal(format!("cannot write to {target}: {error}"), help)
    }

    pub(crate) fn conf(error: &ConfError, text: &str) -> Self {
        Self::conf_of("--alloc-conf", error, text)
    }

    pub(crate) fn conf_of(option: &str, error: &ConfError, text: &str) -> Self {
        let place = (
            error.offset()..error.offset() + error.length(),
            "here".to_owned(),
        );
        let excerpt = Excerpt::new(option, text, &[place]);
        Self::Conf {
            rule: shortened(&error.rule()).into_owned(),
            at: excerpt.labels().collect(),
            text: Arc::new(excerpt),
            help: arms::advice(error),
        }
    }

    /// The error of a file that the user named and that cannot be written.
    pub(crate) fn unwritten(path: &Path) -> impl Fn(io::Error) -> Self {
        move |error| {
            Self::output(
                Some(path),
                &error,
                "free disk space, make it writable, or choose another file",
            )
        }
    }

    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Setup(error) if !error.is_of_input() => Exit::Internal,
            Self::Program(RunnerError::Launch(error)) if !error.is_of_input() => Exit::Internal,
            Self::Scenario(_) | Self::Setup(_) | Self::Conf { .. } => Exit::Invalid,
            Self::Program(RunnerError::Launch(_)) => Exit::Invalid,
            Self::Other { exit, .. } => *exit,
            Self::Store(error) if error.is_of_input() => Exit::Invalid,
            Self::Program(_) | Self::Store(_) => Exit::Internal,
        }
    }
}

impl From<LaunchError> for CliError {
    fn from(error: LaunchError) -> Self {
        Self::Program(error.into())
    }
}

impl From<DeviceError> for CliError {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Unavailable { .. }
            | DeviceError::Driver { .. }
            | DeviceError::OutOfMemory { .. } => Self::device(
                &error,
                "see `harness doctor` for the available devices, or use `--device sim`",
            ),
            // Only a wrong call of the device returns the other errors.
            _ => Self::internal(
                error.to_string(),
                "this is a bug in the harness: report it with the command",
            ),
        }
    }
}

/// Help for a build without a Cargo feature.
#[cfg(not(all(
    feature = "cloud",
    feature = "mcp",
    feature = "parquet",
    feature = "shell"
)))]
pub(crate) fn with_feature(feature: &str) -> String {
    format!(
        "use the Python package or the program that `ci/install` installs, or build with \
         `--features {feature}`"
    )
}

/// All errors of a command; never empty.
#[derive(Debug)]
pub(crate) struct Failures(pub(crate) Vec<CliError>);

impl Failures {
    pub(crate) fn all<T, E: Into<CliError>>(
        results: impl IntoIterator<Item = Result<T, E>>,
    ) -> Result<Vec<T>, Self> {
        let (done, failures) = Self::split(results);
        if failures.is_empty() {
            Ok(done)
        } else {
            Err(Self(failures))
        }
    }

    pub(crate) fn both<T, E: Into<CliError>>(
        one: Result<T, E>,
        other: Result<T, E>,
    ) -> Result<(T, T), Self> {
        match (one, other) {
            (Ok(one), Ok(other)) => Ok((one, other)),
            (one, other) => Err(Self(
                [one.err(), other.err()]
                    .into_iter()
                    .flatten()
                    .map(E::into)
                    .collect(),
            )),
        }
    }

    /// Separates the results from the errors, which may be empty here.
    pub(crate) fn split<T, E: Into<CliError>>(
        results: impl IntoIterator<Item = Result<T, E>>,
    ) -> (Vec<T>, Vec<CliError>) {
        let (done, failures): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
        (
            done.into_iter().flatten().collect(),
            failures
                .into_iter()
                .filter_map(Result::err)
                .map(E::into)
                .collect(),
        )
    }
}

impl<E: Into<CliError>> From<E> for Failures {
    fn from(error: E) -> Self {
        Self(vec![error.into()])
    }
}
