//! Which allocator with which settings: [`AllocatorKind`] registers every allocator, [`AllocatorSpec`] is one of them, or a library of somebody else's, as
//! a scenario, a command line or a benchmark asks for it, under the name of its *arm*.

use std::fmt;
use std::str::FromStr;

use super::caching::{self, ConfError, Config};
use super::library::{LibraryAllocator, LibrarySpec, LibrarySpecError};
use super::{Allocator, async_pool, bfc, direct, rmm_pool};

/// Every allocator that can be named in a scenario: the one place where an allocator is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AllocatorKind {
    /// PyTorch's caching allocator in its default configuration.
    Caching,
    /// The same with expandable segments.
    Expandable,
    /// TensorFlow's best-fit-with-coalescing allocator.
    Bfc,
    /// The pool memory resource of RMM, the RAPIDS Memory Manager.
    RmmPool,
    /// The driver's stream-ordered pool.
    AsyncPool,
    /// One driver allocation and one driver free a request.
    Direct,
}

impl AllocatorKind {
    /// Every one, the baseline of all comparisons last.
    pub const ALL: &'static [Self] = &[Self::Caching, Self::Expandable, Self::Bfc, Self::RmmPool, Self::AsyncPool, Self::Direct];

    /// Its name in scenarios and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Caching => "caching",
            Self::Expandable => "expandable",
            Self::Bfc => "bfc",
            Self::RmmPool => "rmm_pool",
            Self::AsyncPool => "async_pool",
            Self::Direct => "direct",
        }
    }

    /// A fresh allocator of this kind with its own defaults.
    #[must_use]
    pub fn build(self) -> Box<dyn Allocator> {
        AllocatorSpec::from(self).build()
    }

    /// Whether it takes settings of `PYTORCH_ALLOC_CONF`.
    #[must_use]
    pub const fn has_settings(self) -> bool {
        matches!(self, Self::Caching)
    }

    /// Why what it does cannot be recorded with segments and blocks; `None` where it can.
    #[must_use]
    pub const fn not_recorded(self) -> Option<&'static str> {
        match self {
            Self::AsyncPool => Some("the driver tells how much its pool holds, but not which of that memory is free"),
            Self::Caching | Self::Expandable | Self::Bfc | Self::RmmPool | Self::Direct => None,
        }
    }

    /// Whether it is PyTorch's allocator, under whatever settings.
    #[must_use]
    pub const fn is_pytorch(self) -> bool {
        matches!(self, Self::Caching | Self::Expandable)
    }

    /// Reads a name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }
}

/// An allocator and its settings: one arm of a comparison. Displayed as its name.
///
/// PyTorch's allocator has settings, those of `PYTORCH_ALLOC_CONF`, and a library the names of its functions; the others have none. Without a name of its own an arm is called after
/// what it is, as in `direct` or `caching(max_split_size_mb:512)`, and that name reads back ([`FromStr`]) as the same arm.
#[derive(Clone, Debug, PartialEq)]
pub struct AllocatorSpec {
    which: Which,
    name: Option<String>,
}

/// What an arm allocates with.
#[derive(Clone, Debug, PartialEq)]
enum Which {
    /// With other settings than the kind's own; only [`AllocatorKind::Caching`] has any.
    Kind(AllocatorKind, Option<Config>),
    Library(LibrarySpec),
}

/// The name of libraries in scenarios and reports, beside those of [`AllocatorKind`].
pub const LIBRARY: &str = "library";

impl AllocatorSpec {
    /// PyTorch's allocator with these settings.
    #[must_use]
    pub fn caching(config: Config) -> Self {
        let config = (config != Config::default()).then_some(config);
        Self { which: Which::Kind(AllocatorKind::Caching, config), name: None }
    }

    /// The allocator of a shared library.
    #[must_use]
    pub const fn library(library: LibrarySpec) -> Self {
        Self { which: Which::Library(library), name: None }
    }

    /// The same under a name of its own. Such a name says nothing of the settings, so it does not read back.
    #[must_use]
    pub fn named(self, name: impl Into<String>) -> Self {
        Self { name: Some(name.into()), ..self }
    }

    /// Which allocator it is; `None` for one of a library.
    #[must_use]
    pub const fn kind(&self) -> Option<AllocatorKind> {
        match self.which {
            Which::Kind(kind, _) => Some(kind),
            Which::Library(_) => None,
        }
    }

    /// The library, where it is one.
    #[must_use]
    pub const fn as_library(&self) -> Option<&LibrarySpec> {
        match &self.which {
            Which::Kind(..) => None,
            Which::Library(library) => Some(library),
        }
    }

    /// The name of its kind, which is [`LIBRARY`] for one of a library.
    #[must_use]
    pub fn kind_name(&self) -> &'static str {
        self.kind().map_or(LIBRARY, AllocatorKind::name)
    }

    /// Whether it is PyTorch's allocator, under whatever settings.
    #[must_use]
    pub const fn is_pytorch(&self) -> bool {
        matches!(self.which, Which::Kind(kind, _) if kind.is_pytorch())
    }

    /// Why what it does cannot be recorded with segments and blocks; `None` where it can.
    #[must_use]
    pub fn not_recorded(&self) -> Option<&'static str> {
        self.kind()?.not_recorded()
    }

    /// Why its times on a GPU would not be its own; `None` where they are.
    #[must_use]
    pub const fn not_timed(&self) -> Option<&'static str> {
        match self.which {
            Which::Kind(..) => None,
            Which::Library(_) => Some("its calls go from process to process, which takes longer than they do"),
        }
    }

    /// Whether it was given a name of its own.
    #[must_use]
    pub const fn has_own_name(&self) -> bool {
        self.name.is_some()
    }

    /// The settings that differ from PyTorch's defaults, in the form of `PYTORCH_ALLOC_CONF`; `None` where all are as they are by default for
    /// this kind.
    #[must_use]
    pub fn settings(&self) -> Option<String> {
        match &self.which {
            Which::Kind(_, config) => config.as_ref().map(Config::to_string),
            Which::Library(library) => Some(library.to_string()),
        }
    }

    /// Whether it is the same allocator with the same settings, whatever the names; `expandable` is `caching` with
    /// `expandable_segments:True`.
    #[must_use]
    pub fn is_equivalent_to(&self, other: &Self) -> bool {
        match (self.effective(), other.effective()) {
            (Some(config), Some(others)) => config == others,
            (None, None) => self.which == other.which,
            _ => false,
        }
    }

    /// A fresh allocator.
    #[must_use]
    pub fn build(&self) -> Box<dyn Allocator> {
        match &self.which {
            Which::Kind(AllocatorKind::Caching | AllocatorKind::Expandable, _) => {
                Box::new(caching::CachingAllocator::new(self.effective().unwrap_or_default()))
            }
            Which::Kind(AllocatorKind::Bfc, _) => Box::new(bfc::BfcAllocator::new(bfc::BfcConfig::default())),
            Which::Kind(AllocatorKind::RmmPool, _) => Box::new(rmm_pool::RmmPool::new(rmm_pool::RmmPoolConfig::default())),
            Which::Kind(AllocatorKind::AsyncPool, _) => Box::new(async_pool::AsyncPoolAllocator::default()),
            Which::Kind(AllocatorKind::Direct, _) => Box::new(direct::DirectAllocator::default()),
            Which::Library(library) => Box::new(LibraryAllocator::new(library.clone())),
        }
    }

    /// The settings of PyTorch's allocator that it runs with; `None` for any other allocator.
    #[must_use]
    pub fn effective(&self) -> Option<Config> {
        match &self.which {
            Which::Kind(AllocatorKind::Caching, config) => Some(config.clone().unwrap_or_default()),
            Which::Kind(AllocatorKind::Expandable, _) => Some(Config { expandable_segments: true, ..Config::default() }),
            Which::Kind(AllocatorKind::Bfc | AllocatorKind::RmmPool | AllocatorKind::AsyncPool | AllocatorKind::Direct, _)
            | Which::Library(_) => None,
        }
    }
}

impl From<AllocatorKind> for AllocatorSpec {
    fn from(kind: AllocatorKind) -> Self {
        Self { which: Which::Kind(kind, None), name: None }
    }
}

impl fmt::Display for AllocatorSpec {
    /// The name of the arm.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.name, &self.which) {
            (Some(name), _) => f.write_str(name),
            (None, Which::Kind(kind, Some(config))) => write!(f, "{}({config})", kind.name()),
            (None, Which::Kind(kind, None)) => f.write_str(kind.name()),
            (None, Which::Library(library)) => write!(f, "{LIBRARY}({library})"),
        }
    }
}

impl FromStr for AllocatorSpec {
    type Err = SpecError;

    /// Reads the name of an allocator, with or without settings in brackets: `direct`, `caching(max_split_size_mb:512)`,
    /// `library(path:./my_alloc.so,alloc:my_malloc,free:my_free)`.
    fn from_str(text: &str) -> Result<Self, SpecError> {
        let (name, conf) = match text.split_once('(') {
            Some((name, rest)) => (name, Some(rest.strip_suffix(')').ok_or(SpecError::Unclosed)?)),
            None => (text, None),
        };
        if name == LIBRARY {
            return Ok(Self::library(conf.unwrap_or_default().parse()?));
        }
        let kind = AllocatorKind::from_name(name).ok_or_else(|| SpecError::Unknown { name: name.to_owned() })?;
        match (kind, conf) {
            (_, None) => Ok(kind.into()),
            (AllocatorKind::Caching, Some(conf)) => Ok(Self::caching(Config::parse(conf)?)),
            (_, Some(_)) => Err(SpecError::NoSettings(kind)),
        }
    }
}

/// Why an allocator takes no settings, and what to write instead.
fn no_settings(kind: AllocatorKind) -> String {
    let name = kind.name();
    match kind {
        AllocatorKind::Expandable => {
            format!("`{name}` is `caching` with expandable_segments:True: give `caching` this setting beside the others")
        }
        _ => format!("`{name}` has no settings: those of PYTORCH_ALLOC_CONF are for PyTorch's allocator, `caching`"),
    }
}

/// A text that names no allocator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum SpecError {
    /// Name one of those there are.
    #[error("there is no allocator `{name}`")]
    Unknown { name: String },
    /// Close the bracket behind the settings.
    #[error("settings stand in brackets, as in `caching(max_split_size_mb:512)`")]
    Unclosed,
    /// Leave the settings out.
    #[error("{}", no_settings(*.0))]
    NoSettings(AllocatorKind),
    /// Correct the settings.
    #[error(transparent)]
    Conf(#[from] ConfError),
    /// Name the file and the functions.
    #[error(transparent)]
    Library(#[from] LibrarySpecError),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> AllocatorSpec {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn an_arm_is_called_after_what_it_is_and_reads_back_as_the_same() {
        for kind in AllocatorKind::ALL {
            assert_eq!(read(kind.name()), AllocatorSpec::from(*kind));
        }
        for name in ["caching(max_split_size_mb:512)", "caching(max_split_size_mb:64,roundup_power2_divisions:[256:1,512:2,>:4])"] {
            assert_eq!(read(name).to_string(), name);
        }
        assert_eq!(
            read("caching( max_split_size_mb : 64.5 )").to_string(),
            "caching(max_split_size_mb:64)",
            "what counts, as PyTorch reads it"
        );
        assert_eq!(read("caching(large_segment_size_mb:20)").to_string(), "caching", "that is the default");
    }

    #[test]
    fn settings_belong_to_the_arm_whatever_it_is_called() {
        let tuned = read("caching(expandable_segments:True,max_split_size_mb:32)").named("tuned");
        assert_eq!((tuned.to_string(), tuned.has_own_name()), ("tuned".to_owned(), true));
        assert_eq!(tuned.settings().as_deref(), Some("max_split_size_mb:32,expandable_segments:True"));
        assert_eq!(tuned.build().name(), "expandable");
        assert_eq!(read("caching").settings(), None);
    }

    #[test]
    fn arms_are_equivalent_where_their_allocators_and_settings_are_the_same_whatever_they_are_called() {
        assert!(read("expandable").is_equivalent_to(&read("caching(expandable_segments:True)")));
        assert!(read("caching()").is_equivalent_to(&read("caching").named("plain")));
        assert!(!read("caching").is_equivalent_to(&read("expandable")));
        assert!(!read("caching").is_equivalent_to(&read("direct")));
        assert!(!read("bfc").is_equivalent_to(&read("direct")));
    }

    #[test]
    fn a_library_is_an_arm_with_its_file_and_its_functions() {
        let library = "library(path:./my alloc.so,alloc:my_malloc,free:my_free,empty_cache:my_clear)";
        assert_eq!(read(library).to_string(), library);
        assert_eq!((read(library).kind(), read(library).kind_name()), (None, "library"));
        assert!(read(library).is_equivalent_to(&read(library).named("mine")));
        assert!(!read(library).is_equivalent_to(&read("direct")));
        let refusal = |text: &str| text.parse::<AllocatorSpec>().expect_err(text).to_string();
        assert_eq!(refusal("library"), "a library needs `path`");
        assert_eq!(refusal("library(path:a.so,alloc:a)"), "a library needs `free`");
        assert_eq!(
            refusal("library(path:a.so,allocate:a)"),
            "`allocate` is none of `path`, `alloc`, `free`, `record_stream`, `empty_cache`"
        );
    }

    #[test]
    fn what_is_no_arm_is_refused_with_a_sentence() {
        let refusal = |text: &str| text.parse::<AllocatorSpec>().expect_err(text).to_string();
        assert_eq!(refusal("cachign"), "there is no allocator `cachign`");
        assert_eq!(refusal("caching(a"), "settings stand in brackets, as in `caching(max_split_size_mb:512)`");
        assert!(refusal("direct(max_split_size_mb:512)").starts_with("`direct` has no settings"));
        assert!(refusal("expandable(max_split_size_mb:512)").starts_with("`expandable` is `caching` with expandable_segments:True"));
        assert!(refusal("caching(expandable_segments:true)").starts_with("expandable_segments must be `True` or `False`"));
    }
}
