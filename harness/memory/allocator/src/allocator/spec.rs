//! [`AllocatorKind`] lists all allocators. [`AllocatorSpec`] is one of them with settings, or a
//! shared library, as named in a scenario, on the command line or in a benchmark.

use std::{fmt, str::FromStr};

use super::caching::{self, ConfError, Config, TorchVersion, TorchVersionError};
use super::library::{LibraryAllocator, LibrarySpec, LibrarySpecError};
use super::{
    Allocator, async_pool, bfc, cupy_pool, direct, ort_arena, rmm_arena, rmm_binning, rmm_pool,
    xla_bfc,
};
use crate::named::named_enum;

named_enum! {
    /// The allocators of this crate. Register a new allocator here. The last one is the baseline of
    /// all comparisons.
    AllocatorKind {
        /// PyTorch's caching allocator with default settings.
        Caching = "caching",
        /// The same with expandable segments.
        Expandable = "expandable",
        /// TensorFlow's best-fit-with-coalescing allocator.
        Bfc = "bfc",
        /// The pool memory resource of RMM, the RAPIDS Memory Manager.
        RmmPool = "rmm_pool",
        /// The arena memory resource of RMM.
        RmmArena = "rmm_arena",
        /// The binning memory resource of RMM.
        RmmBinning = "rmm_binning",
        /// ONNX Runtime's memory arena.
        OrtArena = "ort_arena",
        /// XLA's allocator in JAX.
        XlaBfc = "xla_bfc",
        /// CuPy's memory pool.
        CupyPool = "cupy_pool",
        /// The driver's stream-ordered pool.
        AsyncPool = "async_pool",
        /// One driver allocation and one driver free per request.
        Direct = "direct",
    }
}

impl AllocatorKind {
    /// Makes an allocator of this kind with default settings.
    pub fn build(self) -> Box<dyn Allocator> {
        AllocatorSpec::from(self).build()
    }

    /// Returns true if it takes settings of `PYTORCH_ALLOC_CONF`.
    pub const fn has_settings(self) -> bool {
        matches!(self, Self::Caching)
    }

    /// The reason why snapshots cannot record its segments and blocks, or `None` if they can.
    pub const fn not_recorded(self) -> Option<&'static str> {
        match self {
            Self::AsyncPool => {
                Some("the driver reports the size of its pool, but not its free blocks")
            }
            Self::Caching
            | Self::Expandable
            | Self::Bfc
            | Self::RmmPool
            | Self::RmmArena
            | Self::RmmBinning
            | Self::CupyPool
            | Self::OrtArena
            | Self::XlaBfc
            | Self::Direct => None,
        }
    }

    /// Returns true if it is PyTorch's allocator, with any settings.
    pub const fn is_pytorch(self) -> bool {
        matches!(self, Self::Caching | Self::Expandable)
    }
}

/// An allocator and its settings. It is displayed as its name.
///
/// PyTorch's allocator has the settings of `PYTORCH_ALLOC_CONF`, and a library has the names of its
/// functions; the others have none. The default name, such as `direct` or
/// `caching(max_split_size_mb:512)`, can be parsed again ([`FromStr`]).
#[derive(Clone, Debug, PartialEq)]
pub struct AllocatorSpec {
    which: Which,
    name: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
enum Which {
    /// With settings that differ from the kind's defaults, for [`AllocatorKind::Caching`] only.
    Kind(AllocatorKind, Option<Config>),
    Library(LibrarySpec),
}

/// The name of libraries in scenarios and reports.
pub const LIBRARY: &str = "library";

impl AllocatorSpec {
    pub fn caching(config: Config) -> Self {
        let config = (config != Config::default()).then_some(config);
        Self {
            which: Which::Kind(AllocatorKind::Caching, config),
            name: None,
        }
    }

    pub const fn library(library: LibrarySpec) -> Self {
        Self {
            which: Which::Library(library),
            name: None,
        }
    }

    /// The same allocator under another name. The name has no settings, so it cannot be parsed
    /// again.
    pub fn named(self, name: impl Into<String>) -> Self {
        Self {
            name: Some(name.into()),
            ..self
        }
    }

    /// The kind of allocator, or `None` for a library.
    pub const fn kind(&self) -> Option<AllocatorKind> {
        match self.which {
            Which::Kind(kind, _) => Some(kind),
            Which::Library(_) => None,
        }
    }

    pub const fn as_library(&self) -> Option<&LibrarySpec> {
        match &self.which {
            Which::Kind(..) => None,
            Which::Library(library) => Some(library),
        }
    }

    /// The name of its kind, or [`LIBRARY`].
    pub fn kind_name(&self) -> &'static str {
        self.kind().map_or(LIBRARY, AllocatorKind::name)
    }

    pub const fn is_pytorch(&self) -> bool {
        matches!(self.which, Which::Kind(kind, _) if kind.is_pytorch())
    }

    pub fn not_recorded(&self) -> Option<&'static str> {
        self.kind()?.not_recorded()
    }

    /// The reason why its times on a GPU are not meaningful, or `None` if they are.
    pub const fn not_timed(&self) -> Option<&'static str> {
        match self.which {
            Which::Kind(..) => None,
            Which::Library(_) => {
                Some("its calls cross processes, which takes longer than the calls themselves")
            }
        }
    }

    /// Returns true if it has another name than the default one.
    pub const fn has_own_name(&self) -> bool {
        self.name.is_some()
    }

    /// The settings that differ from PyTorch's defaults, in the form of `PYTORCH_ALLOC_CONF`; first
    /// the version, as in `torch:2.9`, if it is not the newest. `None` if all are the defaults of
    /// this kind.
    pub fn settings(&self) -> Option<String> {
        match &self.which {
            Which::Kind(_, config) => config.as_ref().map(with_version),
            Which::Library(library) => Some(library.to_string()),
        }
    }

    /// Returns true if it is the same allocator with the same settings under any name. `expandable`
    /// equals `caching` with `expandable_segments:True`.
    pub fn is_equivalent_to(&self, other: &Self) -> bool {
        match (self.effective(), other.effective()) {
            (Some(config), Some(others)) => config == others,
            (None, None) => self.which == other.which,
            _ => false,
        }
    }

    pub fn build(&self) -> Box<dyn Allocator> {
        match &self.which {
            Which::Kind(AllocatorKind::Caching | AllocatorKind::Expandable, _) => Box::new(
                caching::CachingAllocator::new(self.effective().unwrap_or_default()),
            ),
            Which::Kind(AllocatorKind::Bfc, _) => {
                Box::new(bfc::BfcAllocator::new(bfc::BfcConfig::default()))
            }
            Which::Kind(AllocatorKind::RmmPool, _) => {
                Box::new(rmm_pool::RmmPool::new(rmm_pool::RmmPoolConfig::default()))
            }
            Which::Kind(AllocatorKind::RmmArena, _) => Box::new(rmm_arena::RmmArena::default()),
            Which::Kind(AllocatorKind::RmmBinning, _) => {
                Box::new(rmm_binning::RmmBinning::default())
            }
            Which::Kind(AllocatorKind::OrtArena, _) => Box::new(bfc::BfcAllocator::onnx_runtime(
                ort_arena::OrtArenaConfig::default(),
            )),
            Which::Kind(AllocatorKind::XlaBfc, _) => {
                Box::new(bfc::BfcAllocator::xla(xla_bfc::XlaBfcConfig::default()))
            }
            Which::Kind(AllocatorKind::CupyPool, _) => Box::new(cupy_pool::CupyPool::default()),
            Which::Kind(AllocatorKind::AsyncPool, _) => {
                Box::new(async_pool::AsyncPoolAllocator::default())
            }
            Which::Kind(AllocatorKind::Direct, _) => Box::new(direct::DirectAllocator::default()),
            Which::Library(library) => Box::new(LibraryAllocator::new(library.clone())),
        }
    }

    /// The complete settings of PyTorch's allocator, or `None` for any other allocator.
    pub fn effective(&self) -> Option<Config> {
        match &self.which {
            Which::Kind(AllocatorKind::Caching, config) => Some(config.clone().unwrap_or_default()),
            Which::Kind(AllocatorKind::Expandable, _) => Some(Config {
                expandable_segments: true,
                ..Config::default()
            }),
            Which::Kind(
                AllocatorKind::Bfc
                | AllocatorKind::RmmPool
                | AllocatorKind::RmmArena
                | AllocatorKind::RmmBinning
                | AllocatorKind::CupyPool
                | AllocatorKind::OrtArena
                | AllocatorKind::XlaBfc
                | AllocatorKind::AsyncPool
                | AllocatorKind::Direct,
                _,
            )
            | Which::Library(_) => None,
        }
    }
}

impl From<AllocatorKind> for AllocatorSpec {
    fn from(kind: AllocatorKind) -> Self {
        Self {
            which: Which::Kind(kind, None),
            name: None,
        }
    }
}

impl fmt::Display for AllocatorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.name, &self.which) {
            (Some(name), _) => f.write_str(name),
            (None, Which::Kind(kind, Some(config))) => {
                write!(f, "{kind}({})", with_version(config))
            }
            (None, Which::Kind(kind, None)) => kind.fmt(f),
            (None, Which::Library(library)) => write!(f, "{LIBRARY}({library})"),
        }
    }
}

impl FromStr for AllocatorSpec {
    type Err = SpecError;

    /// Parses the name of an allocator, with or without settings in parentheses: `direct`,
    /// `caching(max_split_size_mb:512)`, `caching(torch:2.9,expandable_segments:True)`,
    /// `library(path:./my_alloc.so,alloc:my_malloc,free:my_free)`.
    fn from_str(text: &str) -> Result<Self, SpecError> {
        let (name, conf) = match text.split_once('(') {
            Some((name, rest)) => (
                name,
                Some(rest.strip_suffix(')').ok_or(SpecError::Unclosed)?),
            ),
            None => (text, None),
        };
        if name == LIBRARY {
            return Ok(Self::library(conf.unwrap_or_default().parse()?));
        }
        let kind = AllocatorKind::from_name(name).ok_or_else(|| SpecError::Unknown {
            name: name.to_owned(),
        })?;
        match (kind, conf) {
            (_, None) => Ok(kind.into()),
            (AllocatorKind::Caching, Some(conf)) => {
                let (version, conf) = match conf.strip_prefix(TORCH) {
                    Some(rest) => rest.split_once(',').unwrap_or((rest, "")),
                    None => (TorchVersion::default().name(), conf),
                };
                Ok(Self::caching(Config::parse_for(version.parse()?, conf)?))
            }
            (_, Some(_)) => Err(SpecError::NoSettings(kind)),
        }
    }
}

/// The start of the settings if they are those of an older version of PyTorch.
const TORCH: &str = "torch:";

/// The settings, after the version unless that is the newest.
fn with_version(config: &Config) -> String {
    let version =
        (config.torch != TorchVersion::default()).then(|| format!("{TORCH}{}", config.torch));
    let settings = Some(config.to_string()).filter(|settings| !settings.is_empty());
    version
        .into_iter()
        .chain(settings)
        .collect::<Vec<_>>()
        .join(",")
}

/// Explains that an allocator takes no settings, and what to write instead.
fn no_settings(kind: AllocatorKind) -> String {
    match kind {
        AllocatorKind::Expandable => {
            format!(
                "`{kind}` is `caching` with expandable_segments:True: use `caching` with this \
                 setting and the others"
            )
        }
        _ => format!(
            "`{kind}` has no settings: those of PYTORCH_ALLOC_CONF are for PyTorch's allocator, \
             `caching`"
        ),
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    #[error("there is no allocator `{name}`")]
    Unknown { name: String },
    #[error("write settings in parentheses, as in `caching(max_split_size_mb:512)`")]
    Unclosed,
    #[error("{}", no_settings(*.0))]
    NoSettings(AllocatorKind),
    #[error(transparent)]
    Conf(#[from] ConfError),
    #[error(transparent)]
    Torch(#[from] TorchVersionError),
    #[error(transparent)]
    Library(#[from] LibrarySpecError),
}

#[cfg(test)]
mod tests;
