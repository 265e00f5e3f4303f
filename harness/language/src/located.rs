//! Where things stand in a scenario file: [`Located`] values, [`Position`]s, and the shapes of YAML that serde has no word for.

use std::fmt;
use std::marker::PhantomData;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};

/// A value and the place where the file says it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Located<T> {
    pub value: T,
    /// Line, counted from 1.
    pub line: u32,
    /// Column in characters, counted from 1.
    pub column: u32,
    /// Length in characters, for underlining.
    pub length: u32,
}

impl<T> Located<T> {
    /// Its place alone.
    #[must_use]
    pub const fn position(&self) -> Position {
        Position { line: self.line, column: self.column, length: self.length }
    }

    /// Another value at the same place.
    pub fn with<U>(&self, value: U) -> Located<U> {
        Located { value, line: self.line, column: self.column, length: self.length }
    }
}

impl Located<String> {
    /// The place of some of its characters, where the file spells the text as it was read (or quoted) on one line; else its own place.
    pub fn within(&self, source: &str, start: usize, length: usize) -> Position {
        let line: Vec<char> = source.lines().nth(self.line.saturating_sub(1) as usize).unwrap_or("").chars().collect();
        let first = self.column.saturating_sub(1) as usize;
        let is_spelled = |from: usize| {
            let wanted = self.value.chars().count();
            line.get(from..).is_some_and(|rest| rest.iter().copied().zip(self.value.chars()).filter(|(a, b)| a == b).count() == wanted)
        };
        let is_quoted = matches!(line.get(first), Some('"' | '\''));
        let from = match (is_spelled(first), is_quoted && is_spelled(first + 1)) {
            (false, false) => return self.position(),
            (true, _) => first,
            (false, true) => first + 1,
        };
        Position { line: self.line, column: (from + start + 1) as u32, length: length as u32 }
    }
}

/// A place in a scenario file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// Line, counted from 1.
    pub line: u32,
    /// Column in characters, counted from 1.
    pub column: u32,
    /// Length in characters, for underlining.
    pub length: u32,
}

impl Position {
    /// The place that serde-saphyr names; lines and columns beyond 32 bits do not occur in files of bounded size.
    pub fn of(location: serde_saphyr::Location) -> Self {
        let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        Self { line: narrow(location.line()), column: narrow(location.column()), length: narrow(location.span().len()) }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Located<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = serde_saphyr::Spanned::<T>::deserialize(deserializer)?;
        let Position { line, column, length } = Position::of(spanned.referenced);
        Ok(Self { value: spanned.value, line, column, length })
    }
}

impl<T: JsonSchema> JsonSchema for Located<T> {
    fn inline_schema() -> bool {
        T::inline_schema()
    }
    fn schema_name() -> std::borrow::Cow<'static, str> {
        T::schema_name()
    }
    fn schema_id() -> std::borrow::Cow<'static, str> {
        T::schema_id()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        T::json_schema(generator)
    }
}

/// One scalar, a list of scalars, or a map: which of them is read decides what is meant.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum ListOr<M> {
    /// One scalar.
    One(String),
    /// A list of them.
    Many(Vec<Located<String>>),
    Map(M),
}

/// No map is accepted here.
#[derive(Clone, Debug)]
pub enum NoMap {}

impl<'de> Deserialize<'de> for NoMap {
    fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        Err(de::Error::invalid_type(de::Unexpected::Map, &"a text or a list of texts"))
    }
}

/// Any value: what is meant is decided in the check, which knows its place.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum Tree {
    /// Nothing behind a colon.
    Nothing,
    /// One scalar.
    One(String),
    Many(Vec<Located<Tree>>),
    /// A map, in the order of the file.
    Map(Vec<(Located<String>, Located<Tree>)>),
}

/// The entries of a map in the order of the file, keys with their places.
#[derive(Clone, Debug)]
pub struct Entries<V>(pub Vec<(Located<String>, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Entries<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for EntriesVisitor<V> {
            type Value = Entries<V>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(key) = map.next_key()? {
                    entries.push((key, map.next_value()?));
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(EntriesVisitor(PhantomData))
    }
}

impl<'de, M: Deserialize<'de>> Deserialize<'de> for ListOr<M> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListOrVisitor<M>(PhantomData<M>);
        impl<'de, M: Deserialize<'de>> Visitor<'de> for ListOrVisitor<M> {
            type Value = ListOr<M>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a list of texts, or a map")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(ListOr::One(text.to_owned()))
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Self::Value, E> {
                Ok(ListOr::One(number.to_string()))
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Self::Value, E> {
                Ok(ListOr::One(number.to_string()))
            }
            fn visit_f64<E: de::Error>(self, number: f64) -> Result<Self::Value, E> {
                Ok(ListOr::One(number.to_string()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(seq)).map(ListOr::Many)
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                M::deserialize(MapAccessDeserializer::new(map)).map(ListOr::Map)
            }
        }
        deserializer.deserialize_any(ListOrVisitor(PhantomData))
    }
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TreeVisitor;
        impl<'de> Visitor<'de> for TreeVisitor {
            type Value = Tree;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a list, or a map")
            }
            fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
                Ok(Tree::Nothing)
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Tree::One(text.to_owned()))
            }
            fn visit_bool<E: de::Error>(self, value: bool) -> Result<Self::Value, E> {
                Ok(Tree::One(value.to_string()))
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Self::Value, E> {
                Ok(Tree::One(number.to_string()))
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Self::Value, E> {
                Ok(Tree::One(number.to_string()))
            }
            fn visit_f64<E: de::Error>(self, number: f64) -> Result<Self::Value, E> {
                Ok(Tree::One(number.to_string()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(seq)).map(Tree::Many)
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                Entries::deserialize(MapAccessDeserializer::new(map)).map(|Entries(entries)| Tree::Map(entries))
            }
        }
        deserializer.deserialize_any(TreeVisitor)
    }
}

impl Located<Tree> {
    /// The text, where it is one scalar.
    #[must_use]
    pub fn text(&self) -> Option<Located<String>> {
        match &self.value {
            Tree::One(text) => Some(self.with(text.clone())),
            Tree::Nothing | Tree::Many(_) | Tree::Map(_) => None,
        }
    }

    /// The texts, where it is one scalar or a list of them.
    #[must_use]
    pub fn texts(&self) -> Option<Vec<Located<String>>> {
        match &self.value {
            Tree::Many(all) => all.iter().map(Self::text).collect(),
            _ => self.text().map(|text| vec![text]),
        }
    }
}

impl<M> Located<ListOr<M>> {
    /// The texts, where it is one or a list of them; the map otherwise.
    pub fn texts(&self) -> Result<Vec<Located<String>>, &M> {
        match &self.value {
            ListOr::One(text) => Ok(vec![self.with(text.clone())]),
            ListOr::Many(texts) => Ok(texts.clone()),
            ListOr::Map(map) => Err(map),
        }
    }
}
