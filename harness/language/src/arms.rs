//! The allocators that a scenario runs with: names, or maps with settings, as the file writes them and as they are checked. Settings stand in
//! one string, as in `PYTORCH_ALLOC_CONF`, or in fields of the same names; both are read by the same parser and refused at their place.

use std::borrow::Cow;
use std::path::Path;

use harness_allocator::allocator::caching::{ConfError, Config, Setting};
use harness_allocator::allocator::library::LibrarySpec;
use harness_allocator::allocator::{AllocatorKind, AllocatorSpec, LIBRARY, SpecError};
use harness_base::shared_object;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::error::{Problem, choices};
use crate::located::{Entries, Located, Position};
use crate::text::NameText;

/// What an allocator is, for the reference.
pub const ABOUT: &str = "The name of an allocator, for example `caching`, or a map from it to its settings, for example \
     `{ caching: { conf: \"max_split_size_mb:512\" } }`.";
/// The key with all settings in one string.
const CONF: &str = "conf";
/// The key with the name of the arm.
const NAME: &str = "name";
const CONF_ABOUT: &str = "All settings in one string, as in `PYTORCH_ALLOC_CONF`.";
const NAME_ABOUT: &str = "A name for the arm, to tell it from others of the same allocator; if not given it is made from the settings.";
/// Most allocators of one file: more could not be told apart in a report.
pub const MAX_ARMS: usize = 64;
const LIBRARY_EXAMPLE: &str = "`{ library: { path: ./my_alloc.so, alloc: my_malloc, free: my_free } }`";
/// What a library is, in one line.
pub const LIBRARY_ABOUT: &str =
    "a shared library with the two functions that PyTorch's `CUDAPluggableAllocator` takes, run in a process of its own";
/// The fields of a library with what they mean.
const LIBRARY_FIELDS: [(&str, &str, &str); 7] = [
    (NAME, "*name*", NAME_ABOUT),
    (LibrarySpec::PATH, "a file", "The shared library; the path begins at the folder of the file that names it."),
    ("alloc", "a function", "`void *alloc(ssize_t size, int device, CUstream stream)`."),
    ("free", "a function", "`void free(void *address, ssize_t size, int device, CUstream stream)`."),
    (
        "record_stream",
        "a function",
        "`void record_stream(void *address, CUstream stream)`; without it the library is not told, as in PyTorch.",
    ),
    ("empty_cache", "a function", "`void empty_cache(void)`; without it nothing is asked to go back."),
    (OPTIONAL, TRUTH, "`true`: where there is no such file, the arm is skipped, with the reason. Without it, that is a mistake."),
];
/// The key that lets the file be missing, and what it takes.
const OPTIONAL: &str = "optional";
const TRUTH: &str = "`true` or `false`";
const EXAMPLE: &str = "`{ caching: { conf: \"max_split_size_mb:512\" } }`";

/// An allocator as the file says it. What cannot be one is kept, to be answered by the check with its place.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum ArmWire {
    Name(String),
    /// A name with settings.
    Map(Located<String>, SettingsWire),
    /// A map with several keys.
    SeveralKeys(Located<String>, Located<String>),
    /// A map without any.
    Empty,
}

/// What stands behind the name of an allocator.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum SettingsWire {
    Fields(Vec<(Located<String>, Located<ValueWire>)>),
    /// A scalar, or nothing.
    Bare,
}

/// The value of a setting.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum ValueWire {
    Scalar(String),
    List(Vec<Located<ItemWire>>),
    /// Nothing behind the key.
    Nothing,
}

/// An item of a list of intervals: `256:1`, quoted or not, or the map `256: 1`.
#[derive(Clone, Debug)]
pub struct ItemWire(String);

/// The arms of a scenario: from `allocator:`, from `allocators:`, or `caching` where there is neither. Paths of libraries begin at `folder`.
pub fn check(
    one: Option<&Located<ArmWire>>,
    several: Option<&Located<Vec<Located<ArmWire>>>>,
    source: &str,
    folder: &Path,
) -> Result<Vec<AllocatorSpec>, Problem> {
    let arms: &[Located<ArmWire>] = match (one, several) {
        (Some(one), Some(several)) => {
            return Err(Problem::new(one.position(), "`allocator` and `allocators` stand here both")
                .see(several.position(), "the list")
                .help("put all of them into `allocators`"));
        }
        (Some(one), None) => std::slice::from_ref(one),
        (None, Some(several)) if several.value.is_empty() => {
            return Err(Problem::new(several.position(), "`allocators` names none").help("leave it out for `[caching]`"));
        }
        (None, Some(several)) => &several.value,
        (None, None) => return Ok(vec![AllocatorKind::Caching.into()]),
    };
    if let Some(first_too_many) = arms.get(MAX_ARMS) {
        let message = format!("this is one allocator too many: there are {} in all", arms.len());
        return Err(Problem::new(first_too_many.position(), message).help(format!("a file names at most {MAX_ARMS}")));
    }
    let mut specs: Vec<(AllocatorSpec, Position)> = Vec::new();
    for arm in arms {
        let (spec, at) = (check_arm(arm, source, folder)?, arm.position());
        if let Some((first, first_at)) = specs.iter().find(|(first, _)| is_twice(first, &spec)) {
            return Err(twice(first, &spec, *first_at, at));
        }
        specs.push((spec, at));
    }
    Ok(specs.into_iter().map(|(spec, _)| spec).collect())
}

/// Whether a report could not tell them apart, or would tell the same twice without anybody having asked for it.
fn is_twice(first: &AllocatorSpec, second: &AllocatorSpec) -> bool {
    let is_unnamed = !first.has_own_name() && !second.has_own_name();
    first.to_string() == second.to_string() || (is_unnamed && first.is_equivalent_to(second))
}

fn twice(first: &AllocatorSpec, second: &AllocatorSpec, first_at: Position, at: Position) -> Problem {
    let message = match first.to_string() == second.to_string() {
        true => format!("allocator `{first}` is named twice"),
        false => format!("`{second}` is the same as `{first}`"),
    };
    Problem::new(at, message)
        .see(first_at, "the first one")
        .help("name it once; to run the same settings twice, give each a `name:` of its own")
}

fn check_arm(arm: &Located<ArmWire>, source: &str, folder: &Path) -> Result<AllocatorSpec, Problem> {
    match &arm.value {
        ArmWire::Name(name) if name == LIBRARY => {
            Err(Problem::new(arm.position(), "which library is not said").help(format!("as in {LIBRARY_EXAMPLE}")))
        }
        ArmWire::Map(name, settings) if name.value == LIBRARY => library(name.position(), settings, folder),
        ArmWire::Name(name) => kind_of(&arm.with(name.clone())).map(AllocatorSpec::from),
        ArmWire::Map(name, settings) => with_settings(kind_of(name)?, name.position(), settings, source),
        ArmWire::SeveralKeys(first, second) => {
            let message = format!("`{}` stands in the same map as `{}`", second.value, first.value);
            Err(Problem::new(second.position(), message)
                .help("an allocator is a list item of its own; its settings are indented below it, as in ".to_owned() + EXAMPLE))
        }
        ArmWire::Empty => Err(Problem::new(arm.position(), "this map names no allocator").help(format!("as in {EXAMPLE}"))),
    }
}

fn kind_of(name: &Located<String>) -> Result<AllocatorKind, Problem> {
    AllocatorKind::from_name(&name.value).ok_or_else(|| unknown_allocator(name))
}

fn unknown_allocator(name: &Located<String>) -> Problem {
    Problem::new(name.position(), format!("there is no allocator `{}`", name.value)).help(choices(
        &name.value,
        "allocators",
        AllocatorKind::ALL.iter().map(|kind| kind.name()).chain([LIBRARY]),
    ))
}

/// Why a library cannot be an arm.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Unusable {
    /// The field that is wrong.
    pub field: &'static str,
    /// What is wrong with it.
    pub message: String,
    pub help: String,
}

/// Whether the file is there, is a library for this machine, and has the functions that are named.
///
/// # Errors
/// What of that is not so.
pub fn check_library(library: &LibrarySpec) -> Result<(), Unusable> {
    let exports = shared_object::exports(&library.path).map_err(|error| Unusable {
        field: LibrarySpec::PATH,
        message: format!("`{}` {error}", library.path.display()),
        help: "name a shared library for this machine; in a file its path begins at the folder of the file".to_owned(),
    })?;
    match library.functions().find(|(_, name)| !exports.contains(*name)) {
        None => Ok(()),
        Some((field, name)) => Err(Unusable {
            field,
            message: format!("`{}` has no function `{name}`", library.path.display()),
            help: choices(name, "exported", exports.iter().map(String::as_str).filter(|name| !name.starts_with('_')).take(40)),
        }),
    }
}

/// A library: the file is looked at here, so that what is wrong with it is said at its place.
fn library(at: Position, settings: &SettingsWire, folder: &Path) -> Result<AllocatorSpec, Problem> {
    let example = format!("as in {LIBRARY_EXAMPLE}");
    let SettingsWire::Fields(fields) = settings else {
        return Err(Problem::new(at, "behind `library` stands no map").help(example));
    };
    if let Some((key, _)) = fields.iter().find(|(key, _)| LIBRARY_FIELDS.iter().all(|(field, ..)| *field != key.value)) {
        return Err(Problem::new(key.position(), format!("a library has no field `{}`", key.value)).help(choices(
            &key.value,
            "fields",
            LIBRARY_FIELDS.iter().map(|(field, ..)| *field),
        )));
    }
    let given = |field: &str| fields.iter().find(|(key, _)| key.value == field);
    let text = |field: &str| match given(field) {
        None => Ok(None),
        Some((_, value)) => match &value.value {
            ValueWire::Scalar(text) if !text.is_empty() && !text.contains([',', '(', ')']) => Ok(Some(value.with(text.clone()))),
            _ => Err(Problem::new(value.position(), format!("`{field}` is one text without comma and bracket")).help(example.clone())),
        },
    };
    let needed = |field: &str| text(field)?.ok_or_else(|| Problem::new(at, format!("`library` has no `{field}`")).help(example.clone()));
    let path = needed(LibrarySpec::PATH)?;
    let function = |field: &str| needed(field).map(|name| name.value);
    let optional = |field: &str| text(field).map(|name| name.map(|name| name.value));
    let (record_stream, empty_cache) = (optional("record_stream")?, optional("empty_cache")?);
    let (alloc, free) = (function("alloc")?, function("free")?);
    let library = LibrarySpec { path: folder.join(&path.value), alloc, free, record_stream, empty_cache };
    let is_optional = match text(OPTIONAL)? {
        None => false,
        Some(given) => match given.value.as_str() {
            "True" => true,
            "False" => false,
            _ => return Err(Problem::new(given.position(), format!("`{OPTIONAL}` is {TRUTH}")).help(example)),
        },
    };
    let may_be_missing = is_optional && library.check_file().is_err();
    if !may_be_missing && let Err(Unusable { field, message, help }) = check_library(&library) {
        let at = given(field).map_or(at, |(_, value)| value.position());
        return Err(Problem::new(at, message).help(help));
    }
    let spec = AllocatorSpec::library(library);
    match given(NAME) {
        None => Ok(spec),
        Some((_, name)) => Ok(spec.named(arm_name(name)?)),
    }
}

fn with_settings(kind: AllocatorKind, at: Position, settings: &SettingsWire, source: &str) -> Result<AllocatorSpec, Problem> {
    let SettingsWire::Fields(fields) = settings else {
        return Err(Problem::new(at, format!("behind `{}` stands no map of settings", kind.name()))
            .help(format!("as in {EXAMPLE}; the name alone needs no colon")));
    };
    let (names, settings): (Vec<_>, Vec<_>) = fields.iter().partition(|(key, _)| key.value == NAME);
    let spec = match settings.first() {
        None => kind.into(),
        Some((key, _)) if !kind.has_settings() => return Err(Problem::new(key.position(), SpecError::NoSettings(kind).to_string())),
        Some(_) => AllocatorSpec::caching(config(&settings, source)?),
    };
    match names.first() {
        None => Ok(spec),
        Some((_, name)) => Ok(spec.named(arm_name(name)?)),
    }
}

fn arm_name(given: &Located<ValueWire>) -> Result<String, Problem> {
    let ValueWire::Scalar(text) = &given.value else {
        return Err(Problem::new(given.position(), "a name is wanted here").help("as in `name: large_blocks_whole`"));
    };
    let name = NameText(given.with(text.clone()));
    let text = name.checked()?;
    match AllocatorKind::from_name(text) {
        None => Ok(text.to_owned()),
        Some(_) => {
            Err(Problem::new(name.position(), format!("`{text}` is the name of an allocator"))
                .help("take another name, or leave `name` out"))
        }
    }
}

type Field = (Located<String>, Located<ValueWire>);

/// The settings, from `conf` or from fields.
fn config(fields: &[&Field], source: &str) -> Result<Config, Problem> {
    match fields.iter().find(|(key, _)| key.value == CONF) {
        None => config_of_fields(fields, source),
        Some((key, _)) if fields.len() > 1 => {
            let other = fields.iter().find(|(other, _)| other.value != CONF).map_or(key, |(other, _)| other);
            let message = format!("`{CONF}` and `{}` stand here both", other.value);
            Err(Problem::new(other.position(), message)
                .see(key.position(), "all settings in one string")
                .help("put the setting into the string, or all of them into fields"))
        }
        Some((_, value)) => {
            let ValueWire::Scalar(text) = &value.value else {
                let message = format!("`{CONF}` is one text");
                return Err(Problem::new(value.position(), message).help(format!("as in {EXAMPLE}")));
            };
            let text = value.with(text.clone());
            Config::parse(&text.value).map_err(|error| refused(&error, &[(0, text.clone())], source))
        }
    }
}

/// Puts the fields together to the string that PyTorch would read, and a mistake back to where it stands.
fn config_of_fields(fields: &[&Field], source: &str) -> Result<Config, Problem> {
    let mut conf = Composed::default();
    for (key, value) in fields {
        let Some(setting) = Setting::from_name(&key.value) else { return Err(unknown_key(key)) };
        if !conf.text.is_empty() {
            conf.text.push(',');
        }
        conf.add(key.clone());
        conf.text.push(':');
        match &value.value {
            ValueWire::Scalar(text) => conf.add(plain(setting, value.with(text.clone()), source)?),
            ValueWire::List(items) => {
                conf.add(value.with("[".to_owned()));
                for (index, item) in items.iter().enumerate() {
                    if index > 0 {
                        conf.text.push(',');
                    }
                    conf.add(without_signs(setting, item.with(item.value.0.clone()), &[',', '[', ']'], source)?);
                }
                conf.text.push(']');
            }
            ValueWire::Nothing => {
                return Err(Problem::new(key.position(), format!("nothing stands behind `{}`", key.value))
                    .help(format!("`{}` takes {}", setting.name, setting.takes)));
            }
        }
    }
    Config::parse(&conf.text).map_err(|error| refused(&error, &conf.pieces, source))
}

/// A configuration string and the places in the file that its pieces come from.
#[derive(Default)]
struct Composed {
    text: String,
    /// Each with its offset in the text, in order.
    pieces: Vec<(usize, Located<String>)>,
}

impl Composed {
    fn add(&mut self, piece: Located<String>) {
        let start = self.text.len();
        self.text.push_str(&piece.value);
        self.pieces.push((start, piece));
    }
}

/// A scalar that is one value; of intervals it may be a whole list in brackets.
fn plain(setting: &Setting, value: Located<String>, source: &str) -> Result<Located<String>, Problem> {
    let inside = value.value.strip_prefix('[').and_then(|rest| rest.trim_end().strip_suffix(']'));
    match inside {
        Some(inside) if !inside.contains(['[', ']']) => Ok(value),
        _ => without_signs(setting, value, &[',', ':', '[', ']'], source),
    }
}

/// Refuses what would be more than one value once it is put together with others.
fn without_signs(setting: &Setting, value: Located<String>, signs: &[char], source: &str) -> Result<Located<String>, Problem> {
    match value.value.chars().position(|c| signs.contains(&c)) {
        None => Ok(value),
        Some(at) => Err(Problem::new(value.within(source, at, 1), "one value is wanted here")
            .help(format!("`{}` takes {}; a string of several settings stands behind `{CONF}`", setting.name, setting.takes))),
    }
}

/// The parser's answer at its place in the file: in the piece that the mistake lies in, or begins behind.
fn refused(error: &ConfError, pieces: &[(usize, Located<String>)], source: &str) -> Problem {
    let at = pieces.iter().rev().find(|(start, _)| *start <= error.offset());
    let at = at.map_or_else(Position::default, |(start, piece)| {
        let (before, rest) = piece.value.split_at((error.offset() - start).min(piece.value.len()));
        let length = rest.get(..error.length()).unwrap_or(rest).chars().count();
        piece.within(source, before.chars().count(), length)
    });
    Problem::new(at, error.rule()).help(advice(error))
}

fn unknown_key(key: &Located<String>) -> Problem {
    let keys = Setting::ALL.iter().map(|setting| setting.name).chain([CONF, NAME]);
    if let Some((name, value)) = key.value.split_once(':')
        && Setting::from_name(name).is_some()
    {
        return Problem::new(key.position(), format!("`{}` is one word to YAML", key.value))
            .help(format!("put a blank behind the colon, as in `{name}: {value}`, or the whole string behind `{CONF}:`"));
    }
    Problem::new(key.position(), format!("`{}` is not a setting of PyTorch 2.11's allocator", key.value))
        .help(choices(&key.value, "accepted", keys))
}

/// What to do about a mistake in a configuration string: what the setting takes, or the settings there are.
#[must_use]
pub fn advice(error: &ConfError) -> String {
    match (error, error.setting()) {
        (ConfError::UnknownKey { key, .. }, _) => choices(key, "settings", Setting::ALL.iter().map(|setting| setting.name)),
        (_, Some(setting)) => format!("`{}` takes {}", setting.name, setting.takes),
        (_, None) => "as in `max_split_size_mb:512,garbage_collection_threshold:0.8`".to_owned(),
    }
}

impl<'de> Deserialize<'de> for ArmWire {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ArmVisitor;
        impl<'de> Visitor<'de> for ArmVisitor {
            type Value = ArmWire;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "the name of an allocator, or a map as {EXAMPLE}")
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<Self::Value, E> {
                Ok(ArmWire::Name(name.to_owned()))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let Some(name) = map.next_key::<Located<String>>()? else { return Ok(ArmWire::Empty) };
                let settings = map.next_value()?;
                let mut second = None;
                while let Some(key) = map.next_key::<Located<String>>()? {
                    map.next_value::<IgnoredAny>()?;
                    second = second.or(Some(key));
                }
                Ok(match second {
                    None => ArmWire::Map(name, settings),
                    Some(second) => ArmWire::SeveralKeys(name, second),
                })
            }
        }
        deserializer.deserialize_any(ArmVisitor)
    }
}

impl<'de> Deserialize<'de> for SettingsWire {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SettingsVisitor;
        impl<'de> Visitor<'de> for SettingsVisitor {
            type Value = SettingsWire;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "a map of settings, as in {EXAMPLE}")
            }
            fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
                Ok(SettingsWire::Bare)
            }
            fn visit_str<E: de::Error>(self, _: &str) -> Result<Self::Value, E> {
                Ok(SettingsWire::Bare)
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                Entries::deserialize(MapAccessDeserializer::new(map)).map(|Entries(fields)| SettingsWire::Fields(fields))
            }
        }
        deserializer.deserialize_any(SettingsVisitor)
    }
}

impl<'de> Deserialize<'de> for ValueWire {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ValueVisitor;
        impl<'de> Visitor<'de> for ValueVisitor {
            type Value = ValueWire;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("the value of a setting, or a list of intervals")
            }
            fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
                Ok(ValueWire::Nothing)
            }
            /// YAML's own booleans are spelled as PyTorch spells them; a quoted text is taken as it stands.
            fn visit_bool<E: de::Error>(self, value: bool) -> Result<Self::Value, E> {
                Ok(ValueWire::Scalar(if value { "True" } else { "False" }.to_owned()))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(ValueWire::Scalar(text.to_owned()))
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Self::Value, E> {
                Ok(ValueWire::Scalar(number.to_string()))
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Self::Value, E> {
                Ok(ValueWire::Scalar(number.to_string()))
            }
            fn visit_f64<E: de::Error>(self, number: f64) -> Result<Self::Value, E> {
                Ok(ValueWire::Scalar(number.to_string()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(seq)).map(ValueWire::List)
            }
        }
        deserializer.deserialize_any(ValueVisitor)
    }
}

impl<'de> Deserialize<'de> for ItemWire {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ItemVisitor;
        impl<'de> Visitor<'de> for ItemVisitor {
            type Value = ItemWire;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an interval and its divisions, as `256:2` or `\">:4\"`")
            }
            fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
                Ok(ItemWire(String::new()))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(ItemWire(text.to_owned()))
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Self::Value, E> {
                Ok(ItemWire(number.to_string()))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                let Entries(entries) = Entries::<String>::deserialize(MapAccessDeserializer::new(map))?;
                let items: Vec<String> = entries.into_iter().map(|(key, value)| format!("{}:{value}", key.value)).collect();
                Ok(ItemWire(items.join(",")))
            }
        }
        deserializer.deserialize_any(ItemVisitor)
    }
}

impl JsonSchema for ArmWire {
    fn schema_name() -> Cow<'static, str> {
        "allocator".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let names: Vec<&str> = AllocatorKind::ALL.iter().map(|kind| kind.name()).collect();
        let maps = AllocatorKind::ALL.iter().map(|kind| (kind.name().to_owned(), settings_schema(*kind)));
        let maps: Map<String, Value> = maps.chain([(LIBRARY.to_owned(), library_schema())]).collect();
        json_schema!({
            "description": ABOUT,
            "anyOf": [
                { "enum": names },
                { "type": "object", "properties": maps, "additionalProperties": false, "minProperties": 1, "maxProperties": 1 }
            ]
        })
    }
}

/// What an allocator is, in one line, for people who choose one.
#[must_use]
pub const fn about(kind: AllocatorKind) -> &'static str {
    match kind {
        AllocatorKind::Caching => "PyTorch's caching allocator in its default configuration, byte for byte",
        AllocatorKind::Expandable => "PyTorch's caching allocator with expandable_segments:True: segments grow and shrink by pages",
        AllocatorKind::Bfc => "TensorFlow's best-fit-with-coalescing allocator: few, doubling regions that are kept; grows on demand",
        AllocatorKind::RmmPool => "RMM's pool_memory_resource: half the memory at once, a free list per stream, stealing behind events",
        AllocatorKind::AsyncPool => {
            "the driver's stream-ordered pool (`cudaMallocAsync`), which keeps all it has reserved until it is trimmed"
        }
        AllocatorKind::Direct => "one driver allocation and one driver free per request: the baseline of every timing",
    }
}

fn settings_schema(kind: AllocatorKind) -> Value {
    let mut fields = Map::new();
    fields.insert(NAME.to_owned(), serde_json::json!({ "type": "string", "description": NAME_ABOUT }));
    if kind.has_settings() {
        fields.insert(CONF.to_owned(), serde_json::json!({ "type": "string", "description": CONF_ABOUT }));
        fields.extend(Setting::ALL.iter().map(|setting| (setting.name.to_owned(), setting_schema(setting))));
    }
    serde_json::json!({ "type": "object", "description": about(kind), "properties": fields, "additionalProperties": false })
}

fn library_schema() -> Value {
    let field = |(name, takes, about): &(&str, &str, &str)| {
        let kind = if *takes == TRUTH { "boolean" } else { "string" };
        ((*name).to_owned(), serde_json::json!({ "type": kind, "description": about }))
    };
    let fields: Map<String, Value> = LIBRARY_FIELDS.iter().map(field).collect();
    let needed =
        [LibrarySpec::PATH].into_iter().chain(LibrarySpec::FUNCTIONS.into_iter().filter(|(_, needed)| *needed).map(|(name, _)| name));
    let needed: Vec<&str> = needed.collect();
    serde_json::json!({
        "type": "object", "description": LIBRARY_ABOUT, "properties": fields, "required": needed, "additionalProperties": false
    })
}

/// What may be written; the rule of PyTorch stands in the description.
fn setting_schema(setting: &Setting) -> Value {
    let description = format!("{} Takes {}.", setting.about, setting.takes);
    match setting.name {
        "roundup_power2_divisions" => serde_json::json!({ "description": description, "type": ["integer", "string", "array"] }),
        _ if setting.takes.contains("`True`") => {
            serde_json::json!({ "description": description, "anyOf": [{ "type": "boolean" }, { "enum": ["True", "False"] }] })
        }
        "backend" => serde_json::json!({ "description": description, "const": "native" }),
        _ => serde_json::json!({ "description": description, "type": ["number", "string"] }),
    }
}

/// The fields of a library, for the reference: each with what it takes and what it is.
#[must_use]
pub fn library_fields() -> Vec<[String; 3]> {
    LIBRARY_FIELDS.iter().map(|(name, takes, about)| [format!("`{name}`"), (*takes).to_owned(), (*about).to_owned()]).collect()
}

/// The fields of an allocator's map, for the reference: each with what it takes and what it does.
#[must_use]
pub fn fields() -> Vec<[String; 3]> {
    let row = |name: &str, takes: &str, about: &str| [format!("`{name}`"), takes.to_owned(), about.to_owned()];
    let first = [row(NAME, "*name*", NAME_ABOUT), row(CONF, "text", CONF_ABOUT)];
    first.into_iter().chain(Setting::ALL.iter().map(|setting| row(setting.name, setting.takes, setting.about))).collect()
}
