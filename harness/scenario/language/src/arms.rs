//! The allocators of a scenario or a suite: names, or maps with settings. Settings are one string,
//! as in `PYTORCH_ALLOC_CONF`, or fields of the same names. One parser reads both.

use std::{collections::BTreeMap, path::Path};

use crate::schema::JsonSchema;
use harness_allocator::allocator::caching::{
    ConfError, Config, Setting, TorchVersion, TorchVersionError,
};
use harness_allocator::allocator::{
    AllocatorKind, AllocatorSpec, LIBRARY, SpecError, library::LibrarySpec,
};
use harness_base::shared_object;
#[cfg(feature = "schema")]
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
#[cfg(feature = "schema")]
use serde_json::{Map, Value};

use crate::error::{Problem, choices};
use crate::located::{Located, Position, Tree};
use crate::text::NameText;

pub const ABOUT: &str = "The name of an allocator, as in `caching`, or a map from the name to its \
     settings, as in \
     `{ caching: { conf: \"max_split_size_mb:512\" } }`.";
const CONF: &str = "conf";
const NAME: &str = "name";
const TORCH: &str = "torch";
const TORCH_ABOUT: &str =
    "The version of PyTorch whose decisions it makes, from 2.4 to 2.15. The default is the newest.";
const CONF_ABOUT: &str = "All settings in one string, as in `PYTORCH_ALLOC_CONF`.";
const NAME_ABOUT: &str =
    "A name for this configuration. If not given, the name is made from the settings.";
pub const MAX_ARMS: usize = 64;
const LIBRARY_EXAMPLE: &str =
    "`{ library: { path: ./my_alloc.so, alloc: my_malloc, free: my_free } }`";
pub const LIBRARY_ABOUT: &str = "a shared library with the two functions that PyTorch's \
     `CUDAPluggableAllocator` takes, run in its own process";
const LIBRARY_FIELDS: [(&str, &str, &str); 7] = [
    (NAME, "*name*", NAME_ABOUT),
    (
        LibrarySpec::PATH,
        "a file",
        "The shared library, relative to the folder of the file that names it.",
    ),
    (
        "alloc",
        "a function",
        "`void *alloc(ssize_t size, int device, CUstream stream)`.",
    ),
    (
        "free",
        "a function",
        "`void free(void *address, ssize_t size, int device, CUstream stream)`.",
    ),
    (
        "record_stream",
        "a function",
        "`void record_stream(void *address, CUstream stream)`. Without it, the library does not \
         learn about other streams, as in PyTorch.",
    ),
    (
        "empty_cache",
        "a function",
        "`void empty_cache(void)`. Without it, `empty_cache` does nothing.",
    ),
    (
        OPTIONAL,
        TRUTH,
        "`true`: skip this allocator, with the reason, if the file does not exist. Otherwise a \
         missing file is an error.",
    ),
];
/// The key that allows the file to be missing.
const OPTIONAL: &str = "optional";
const TRUTH: &str = "`true` or `false`";
const EXAMPLE: &str = "`{ caching: { conf: \"max_split_size_mb:512\" } }`";

/// An allocator as the file writes it.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent, rename = "allocator")]
#[schemars(description = ABOUT)]
pub struct ArmWire(#[schemars(schema_with = "forms")] Tree);

/// Checks `allocator:` or `allocators:`; `caching` if both are missing. Paths of libraries are
/// relative to `folder`.
pub fn check(
    one: Option<&Located<ArmWire>>,
    several: Option<&Located<Vec<Located<ArmWire>>>>,
    source: &str,
    folder: &Path,
) -> Result<Vec<AllocatorSpec>, Problem> {
    let arms: &[Located<ArmWire>] = match (one, several) {
        (Some(one), Some(several)) => {
            return Err(
                Problem::new(one.at, "`allocator` and `allocators` exclude each other")
                    .see(several.at, "the list")
                    .help("put all of them into `allocators`"),
            );
        }
        (Some(one), None) => std::slice::from_ref(one),
        (None, Some(several)) if several.value.is_empty() => {
            return Err(Problem::new(several.at, "`allocators` is empty")
                .help("name an allocator, or remove the key for `[caching]`"));
        }
        (None, Some(several)) => &several.value,
        (None, None) => return Ok(vec![AllocatorKind::Caching.into()]),
    };
    if let Some(first_too_many) = arms.get(MAX_ARMS) {
        let message = format!("too many allocators: {}", arms.len());
        return Err(Problem::new(first_too_many.at, message)
            .help(format!("a file names at most {MAX_ARMS}")));
    }
    let mut specs: Vec<AllocatorSpec> = Vec::new();
    for arm in arms {
        let spec = check_arm(arm, source, folder)?;
        let has_its_name = |first: &AllocatorSpec| first.to_string() == spec.to_string();
        let is_unnamed_twin = |first: &AllocatorSpec| {
            !first.has_own_name() && !spec.has_own_name() && first.is_equivalent_to(&spec)
        };
        if let Some(number) = specs
            .iter()
            .position(|first| has_its_name(first) || is_unnamed_twin(first))
        {
            let first = &specs[number];
            let message = match has_its_name(first) {
                true => format!("allocator `{first}` is named twice"),
                false => format!("`{spec}` is the same as `{first}`"),
            };
            return Err(Problem::new(arm.at, message)
                .see(arms[number].at, "the first one")
                .help("name it once; to run the same settings twice, give each a `name:`"));
        }
        specs.push(spec);
    }
    Ok(specs)
}

fn check_arm(
    arm: &Located<ArmWire>,
    source: &str,
    folder: &Path,
) -> Result<AllocatorSpec, Problem> {
    let (name, settings) = match &arm.value.0 {
        Tree::One(name) => (arm.with(name.clone()), None),
        Tree::Map(entries) => match entries.as_slice() {
            [(name, settings)] => (name.clone(), Some(settings)),
            [(first, _), (second, _), ..] => {
                let message = format!("`{}` is in the same map as `{}`", second.value, first.value);
                return Err(Problem::new(second.at, message).help(format!(
                    "write each allocator as its own list item, with its settings \
                         indented below it, as in {EXAMPLE}"
                )));
            }
            [] => {
                return Err(Problem::new(arm.at, "this map names no allocator")
                    .help(format!("as in {EXAMPLE}")));
            }
        },
        Tree::Nothing | Tree::Many(_) => {
            return Err(Problem::new(arm.at, "expected an allocator")
                .help(format!("as in `caching` or {EXAMPLE}")));
        }
    };
    match settings {
        None if name.value == LIBRARY => {
            Err(Problem::new(arm.at, "`library` needs fields")
                .help(format!("as in {LIBRARY_EXAMPLE}")))
        }
        Some(settings) if name.value == LIBRARY => library(name.at, settings, folder),
        None => kind_of(&name).map(AllocatorSpec::from),
        Some(settings) => with_settings(kind_of(&name)?, name.at, settings, source),
    }
}

fn kind_of(name: &Located<String>) -> Result<AllocatorKind, Problem> {
    let names = AllocatorKind::ALL
        .iter()
        .map(|kind| kind.name())
        .chain([LIBRARY]);
    let unknown = || {
        Problem::not_among(
            name,
            format!("there is no allocator `{}`", name.value),
            "allocators",
            names,
        )
    };
    AllocatorKind::from_name(&name.value).ok_or_else(unknown)
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unusable {
    pub field: &'static str,
    pub message: String,
    pub help: String,
}

pub fn check_library(library: &LibrarySpec) -> Result<(), Unusable> {
    let exports = shared_object::exports(&library.path).map_err(|error| Unusable {
        field: LibrarySpec::PATH,
        message: format!("`{}` {error}", library.path.display()),
        help:
            "name a shared library for this machine; paths are relative to the folder of the file"
                .to_owned(),
    })?;
    match library
        .functions()
        .find(|(_, name)| !exports.contains(*name))
    {
        None => Ok(()),
        Some((field, name)) => Err(Unusable {
            field,
            message: format!("`{}` has no function `{name}`", library.path.display()),
            help: choices(
                name,
                "exported",
                exports
                    .iter()
                    .map(String::as_str)
                    .filter(|name| !name.starts_with('_'))
                    .take(40),
            ),
        }),
    }
}

/// Checks a library. Opens its file too, so that an error has the position of the field.
fn library(
    at: Position,
    settings: &Located<Tree>,
    folder: &Path,
) -> Result<AllocatorSpec, Problem> {
    let example = format!("as in {LIBRARY_EXAMPLE}");
    let Tree::Map(fields) = &settings.value else {
        return Err(Problem::new(at, "`library` needs fields").help(example));
    };
    let mut given = BTreeMap::new();
    for (key, value) in fields {
        let field = key.value.as_str();
        if !LIBRARY_FIELDS.iter().any(|(known, ..)| *known == field) {
            let names = LIBRARY_FIELDS.iter().map(|(known, ..)| *known);
            return Err(Problem::not_among(
                key,
                format!("a library has no field `{field}`"),
                "fields",
                names,
            ));
        }
        let text = value
            .text()
            .filter(|text| !text.value.is_empty() && !text.value.contains([',', '(', ')']));
        let wrong = || {
            Problem::new(
                value.at,
                format!("expected text without commas and brackets as `{field}`"),
            )
            .help(example.clone())
        };
        given.insert(field, text.ok_or_else(wrong)?);
    }
    let optional = |field: &str| given.get(field).map(|text| text.value.clone());
    let needed = |field: &str| {
        optional(field).ok_or_else(|| {
            Problem::new(at, format!("the field `{field}` of `library` is missing"))
                .help(example.clone())
        })
    };
    let library = LibrarySpec {
        path: folder.join(needed(LibrarySpec::PATH)?),
        alloc: needed("alloc")?,
        free: needed("free")?,
        record_stream: optional("record_stream"),
        empty_cache: optional("empty_cache"),
    };
    let is_optional = match given.get(OPTIONAL) {
        None => false,
        Some(given) => given.value.parse().map_err(|_| {
            Problem::new(given.at, format!("`{OPTIONAL}` must be {TRUTH}")).help(example)
        })?,
    };
    let may_be_missing = is_optional && library.check_file().is_err();
    if !may_be_missing
        && let Err(Unusable {
            field,
            message,
            help,
        }) = check_library(&library)
    {
        let at = given.get(field).map_or(at, |given| given.at);
        return Err(Problem::new(at, message).help(help));
    }
    named(AllocatorSpec::library(library), given.remove(NAME))
}

fn with_settings(
    kind: AllocatorKind,
    at: Position,
    settings: &Located<Tree>,
    source: &str,
) -> Result<AllocatorSpec, Problem> {
    let Tree::Map(fields) = &settings.value else {
        return Err(Problem::new(
            at,
            format!("expected a map of settings after `{}:`", kind.name()),
        )
        .help(format!(
            "as in {EXAMPLE}; without settings, remove the colon"
        )));
    };
    let (names, others): (Vec<_>, Vec<_>) = fields.iter().partition(|(key, _)| key.value == NAME);
    let spec = match others.first() {
        None => kind.into(),
        Some((key, _)) if !kind.has_settings() => {
            return Err(Problem::new(
                key.at,
                SpecError::NoSettings(kind).to_string(),
            ));
        }
        Some(_) => {
            let (versions, settings): (Vec<_>, Vec<_>) =
                others.into_iter().partition(|(key, _)| key.value == TORCH);
            let torch = versions
                .first()
                .map_or(Ok(TorchVersion::default()), |(_, version)| torch(version))?;
            AllocatorSpec::caching(config(torch, &settings, source)?)
        }
    };
    let wrong = |name: &Located<Tree>| {
        Problem::new(name.at, "expected a name").help("as in `name: large_blocks_whole`")
    };
    named(
        spec,
        names
            .first()
            .map(|(_, name)| name.text().ok_or_else(|| wrong(name)))
            .transpose()?,
    )
}

fn torch(given: &Located<Tree>) -> Result<TorchVersion, Problem> {
    let help = "as in `torch: \"2.9\"`";
    let text = given
        .text()
        .ok_or_else(|| Problem::new(given.at, "expected a version of PyTorch").help(help))?;
    text.value
        .parse()
        .map_err(|error: TorchVersionError| Problem::new(text.at, error.to_string()).help(help))
}

fn named(spec: AllocatorSpec, name: Option<Located<String>>) -> Result<AllocatorSpec, Problem> {
    let Some(name) = name.map(NameText) else {
        return Ok(spec);
    };
    let text = name.checked()?;
    match AllocatorKind::from_name(text) {
        None => Ok(spec.named(text.to_owned())),
        Some(_) => Err(
            Problem::new(name.at, format!("`{text}` is the name of an allocator"))
                .help("choose another name, or remove `name`"),
        ),
    }
}

type Field = (Located<String>, Located<Tree>);

fn config(torch: TorchVersion, fields: &[&Field], source: &str) -> Result<Config, Problem> {
    match fields.iter().find(|(key, _)| key.value == CONF) {
        None => config_of_fields(torch, fields, source),
        Some((key, _)) if fields.len() > 1 => {
            let other = fields
                .iter()
                .find(|(other, _)| other.value != CONF)
                .map_or(key, |(other, _)| other);
            let message = format!("`{CONF}` and `{}` exclude each other", other.value);
            Err(Problem::new(other.at, message)
                .see(key.at, "all settings in one string")
                .help("write all settings in the string, or all as fields"))
        }
        Some((_, value)) => {
            let text = value.text().ok_or_else(|| {
                Problem::new(value.at, format!("expected text as `{CONF}`"))
                    .help(format!("as in {EXAMPLE}"))
            })?;
            Config::parse_for(torch, &text.value)
                .map_err(|error| refused(&error, &[(0, text.clone())], source))
        }
    }
}

/// Joins the fields into the string that PyTorch would read. A mistake in it is reported at the
/// field that it came from.
fn config_of_fields(
    torch: TorchVersion,
    fields: &[&Field],
    source: &str,
) -> Result<Config, Problem> {
    let mut conf = Composed::default();
    for (key, value) in fields {
        let Some(setting) = Setting::from_name(&key.value) else {
            return Err(unknown_key(key));
        };
        if !conf.text.is_empty() {
            conf.text.push(',');
        }
        conf.add(key.clone());
        conf.text.push(':');
        match &value.value {
            Tree::One(text) => conf.add(plain(
                setting,
                value.with(as_pytorch_writes(setting, text)),
                source,
            )?),
            Tree::Many(items) => {
                conf.add(value.with("[".to_owned()));
                for (index, item) in items.iter().enumerate() {
                    if index > 0 {
                        conf.text.push(',');
                    }
                    conf.add(without_signs(
                        setting,
                        item.with(interval(item)?),
                        &[',', '[', ']'],
                        source,
                    )?);
                }
                conf.text.push(']');
            }
            Tree::Nothing | Tree::Map(_) => {
                return Err(Problem::new(
                    key.at,
                    format!("expected a value after `{}:`", key.value),
                )
                .help(format!("`{}` takes {}", setting.name, setting.takes)));
            }
        }
    }
    Config::parse_for(torch, &conf.text).map_err(|error| refused(&error, &conf.pieces, source))
}

#[derive(Default)]
struct Composed {
    text: String,
    /// Each piece with its offset in the text, in order.
    pieces: Vec<(usize, Located<String>)>,
}

impl Composed {
    fn add(&mut self, piece: Located<String>) {
        let start = self.text.len();
        self.text.push_str(&piece.value);
        self.pieces.push((start, piece));
    }
}

/// PyTorch writes `True` and `False`, YAML `true` and `false`.
fn as_pytorch_writes(setting: &Setting, text: &str) -> String {
    match text {
        "true" if setting.takes.contains("`True`") => "True".to_owned(),
        "false" if setting.takes.contains("`True`") => "False".to_owned(),
        _ => text.to_owned(),
    }
}

/// An item of a list of intervals: `256:1`, quoted or not, which YAML may read as the map `256: 1`.
fn interval(item: &Located<Tree>) -> Result<String, Problem> {
    let wrong = |at: Position| {
        Problem::new(at, "expected an interval and its divisions")
            .help("as in `256:2` or `\">:4\"`")
    };
    match &item.value {
        Tree::One(text) => Ok(text.clone()),
        Tree::Nothing => Ok(String::new()),
        Tree::Many(_) => Err(wrong(item.at)),
        Tree::Map(entries) => {
            let pair = |(key, value): &Field| match value.text() {
                Some(value) => Ok(format!("{}:{}", key.value, value.value)),
                None => Err(wrong(value.at)),
            };
            Ok(entries
                .iter()
                .map(pair)
                .collect::<Result<Vec<_>, _>>()?
                .join(","))
        }
    }
}

fn plain(
    setting: &Setting,
    value: Located<String>,
    source: &str,
) -> Result<Located<String>, Problem> {
    let inside = value
        .value
        .strip_prefix('[')
        .and_then(|rest| rest.trim_end().strip_suffix(']'));
    match inside {
        Some(inside) if !inside.contains(['[', ']']) => Ok(value),
        _ => without_signs(setting, value, &[',', ':', '[', ']'], source),
    }
}

/// Refuses characters that would make several values of it in the joined string.
fn without_signs(
    setting: &Setting,
    value: Located<String>,
    signs: &[char],
    source: &str,
) -> Result<Located<String>, Problem> {
    match value.value.chars().position(|c| signs.contains(&c)) {
        None => Ok(value),
        Some(at) => Err(
            Problem::new(value.within(source, at, 1), "expected one value").help(format!(
                "`{}` takes {}; write a string of several settings after `{CONF}:`",
                setting.name, setting.takes
            )),
        ),
    }
}

/// Reports the parser's error at the piece of the file that contains the mistake.
fn refused(error: &ConfError, pieces: &[(usize, Located<String>)], source: &str) -> Problem {
    let at = pieces
        .iter()
        .rev()
        .find(|(start, _)| *start <= error.offset());
    let at = at.map_or_else(Position::default, |(start, piece)| {
        let (before, rest) = piece
            .value
            .split_at((error.offset() - start).min(piece.value.len()));
        let length = rest.get(..error.length()).unwrap_or(rest).chars().count();
        piece.within(source, before.chars().count(), length)
    });
    Problem::new(at, error.rule()).help(advice(error))
}

fn unknown_key(key: &Located<String>) -> Problem {
    let keys = Setting::ALL
        .iter()
        .map(|setting| setting.name)
        .chain([CONF, NAME, TORCH]);
    if let Some((name, value)) = key.value.split_once(':')
        && Setting::from_name(name).is_some()
    {
        return Problem::new(
            key.at,
            format!("`{}` has no space after the colon", key.value),
        )
        .help(format!(
            "write `{name}: {value}`, or put the whole string after `{CONF}:`"
        ));
    }
    Problem::new(
        key.at,
        format!("`{}` is not a setting of PyTorch's allocator", key.value),
    )
    .help(choices(&key.value, "accepted", keys))
}

/// Advice for a mistake in a configuration string: the values that the setting takes, or the list
/// of settings.
pub fn advice(error: &ConfError) -> String {
    match (error, error.setting()) {
        (ConfError::UnknownKey { key, .. }, _) => choices(
            key,
            "settings",
            Setting::ALL.iter().map(|setting| setting.name),
        ),
        (ConfError::TooNew { since, .. }, _) => {
            format!("give a newer version, as in `torch: \"{since}\"`, or remove the setting")
        }
        (_, Some(setting)) => format!("`{}` takes {}", setting.name, setting.takes),
        (_, None) => "as in `max_split_size_mb:512,garbage_collection_threshold:0.8`".to_owned(),
    }
}

#[cfg(feature = "schema")]
fn forms(_: &mut SchemaGenerator) -> Schema {
    let names: Vec<&str> = AllocatorKind::ALL.iter().map(|kind| kind.name()).collect();
    let maps = AllocatorKind::ALL
        .iter()
        .map(|kind| (kind.name().to_owned(), settings_schema(*kind)));
    let maps: Map<String, Value> = maps
        .chain([(LIBRARY.to_owned(), library_schema())])
        .collect();
    json_schema!({
        "anyOf": [
            { "enum": names },
            {
                "type": "object", "properties": maps, "additionalProperties": false,
                "minProperties": 1, "maxProperties": 1,
            }
        ]
    })
}

pub const fn about(kind: AllocatorKind) -> &'static str {
    match kind {
        AllocatorKind::Caching => {
            "PyTorch's caching allocator in its default configuration, byte for byte"
        }
        AllocatorKind::Expandable => {
            "PyTorch's caching allocator with expandable_segments:True: segments grow and shrink \
             by pages"
        }
        AllocatorKind::Bfc => {
            "TensorFlow's best-fit-with-coalescing (BFC) allocator: a few regions of doubling \
             size, allocated on demand and kept"
        }
        AllocatorKind::RmmPool => {
            "RMM's `pool_memory_resource`: reserves half the memory at start, keeps a free list \
             per stream, takes blocks of other streams after an event"
        }
        AllocatorKind::RmmArena => {
            "RMM's `arena_memory_resource`: half of the memory in one region that never grows; \
             small requests of a stream come from superblocks of at least 1 MiB, which it keeps \
             until a request fails"
        }
        AllocatorKind::RmmBinning => {
            "RMM's `binning_memory_resource` on `rmm_pool`: bins from 256 KiB to 4 MiB take 128 \
             blocks each at start, 992 MiB in all; larger requests go to the pool"
        }
        AllocatorKind::OrtArena => {
            "ONNX Runtime's arena (`BFCArena`) with its defaults: as `bfc`, but regions double \
             from 1 MiB to 1 GiB and are released only by `empty_cache`"
        }
        AllocatorKind::XlaBfc => {
            "XLA's allocator in JAX: three quarters of the memory in one region, which is filled \
             from its upper end"
        }
        AllocatorKind::CupyPool => {
            "CuPy's memory pool: allocates exactly what a request needs, keeps it, and reuses it \
             on the same stream only"
        }
        AllocatorKind::AsyncPool => {
            "the driver's stream-ordered pool (`cudaMallocAsync`); keeps its reserved memory until \
             it is trimmed"
        }
        AllocatorKind::Direct => {
            "one driver allocation and one driver free per request: the baseline of timings"
        }
    }
}

#[cfg(feature = "schema")]
fn settings_schema(kind: AllocatorKind) -> Value {
    let mut fields = Map::new();
    fields.insert(
        NAME.to_owned(),
        serde_json::json!({ "type": "string", "description": NAME_ABOUT }),
    );
    if kind.has_settings() {
        fields.insert(
            CONF.to_owned(),
            serde_json::json!({ "type": "string", "description": CONF_ABOUT }),
        );
        fields.insert(
            TORCH.to_owned(),
            serde_json::json!({ "type": ["number", "string"], "description": TORCH_ABOUT }),
        );
        fields.extend(
            Setting::ALL
                .iter()
                .map(|setting| (setting.name.to_owned(), setting_schema(setting))),
        );
    }
    serde_json::json!({ "type": "object", "description": about(kind), "properties": fields,
        "additionalProperties": false })
}

#[cfg(feature = "schema")]
fn library_schema() -> Value {
    let field = |(name, takes, about): &(&str, &str, &str)| {
        let kind = if *takes == TRUTH { "boolean" } else { "string" };
        (
            (*name).to_owned(),
            serde_json::json!({ "type": kind, "description": about }),
        )
    };
    let fields: Map<String, Value> = LIBRARY_FIELDS.iter().map(field).collect();
    let needed = [LibrarySpec::PATH].into_iter().chain(
        LibrarySpec::FUNCTIONS
            .into_iter()
            .filter(|(_, needed)| *needed)
            .map(|(name, _)| name),
    );
    let needed: Vec<&str> = needed.collect();
    serde_json::json!({
        "type": "object", "description": LIBRARY_ABOUT, "properties": fields, "required": needed,
        "additionalProperties": false
    })
}

#[cfg(feature = "schema")]
fn setting_schema(setting: &Setting) -> Value {
    let description = format!("{} Takes {}.", about_setting(setting), setting.takes);
    match setting.name {
        "roundup_power2_divisions" => {
            serde_json::json!({ "description": description,
                "type": ["integer", "string", "array"] })
        }
        _ if setting.takes.contains("`True`") => {
            serde_json::json!({ "description": description,
                "anyOf": [{ "type": "boolean" }, { "enum": ["True", "False"] }] })
        }
        "backend" => serde_json::json!({ "description": description, "const": "native" }),
        _ => serde_json::json!({ "description": description, "type": ["number", "string"] }),
    }
}

pub fn library_fields() -> Vec<[String; 3]> {
    LIBRARY_FIELDS
        .iter()
        .map(|(name, takes, about)| {
            [
                format!("`{name}`"),
                (*takes).to_owned(),
                (*about).to_owned(),
            ]
        })
        .collect()
}

pub fn fields() -> Vec<[String; 3]> {
    let row = |name: &str, takes: &str, about: &str| {
        [format!("`{name}`"), takes.to_owned(), about.to_owned()]
    };
    let first = [
        row(NAME, "*name*", NAME_ABOUT),
        row(TORCH, "a version such as `\"2.9\"`", TORCH_ABOUT),
        row(CONF, "text", CONF_ABOUT),
    ];
    first
        .into_iter()
        .chain(
            Setting::ALL
                .iter()
                .map(|setting| row(setting.name, setting.takes, &about_setting(setting))),
        )
        .collect()
}

fn about_setting(setting: &Setting) -> String {
    if setting.since == TorchVersion::ALL[0] {
        setting.about.to_owned()
    } else {
        format!("{} Since PyTorch {}.", setting.about, setting.since)
    }
}
