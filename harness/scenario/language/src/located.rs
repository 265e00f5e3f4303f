//! [`Located`] values, [`Position`]s, and YAML shapes that serde cannot express.

use std::{fmt, marker::PhantomData};

use crate::schema::JsonSchema;
#[cfg(feature = "schema")]
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located<T> {
    pub value: T,
    pub at: Position,
}

impl<T> Located<T> {
    pub fn with<U>(&self, value: U) -> Located<U> {
        Located { value, at: self.at }
    }
}

impl Located<String> {
    /// The position of some of its characters if the file writes the text on one line, quoted or
    /// not; otherwise its own position.
    pub fn within(&self, source: &str, start: usize, length: usize) -> Position {
        let line: Vec<char> = source
            .lines()
            .nth(self.at.line.saturating_sub(1) as usize)
            .unwrap_or("")
            .chars()
            .collect();
        let first = self.at.column.saturating_sub(1) as usize;
        let is_spelled = |from: usize| {
            let wanted = self.value.chars().count();
            line.get(from..).is_some_and(|rest| {
                rest.iter()
                    .copied()
                    .zip(self.value.chars())
                    .filter(|(a, b)| a == b)
                    .count()
                    == wanted
            })
        };
        let is_quoted = matches!(line.get(first), Some('"' | '\''));
        let from = match (is_spelled(first), is_quoted && is_spelled(first + 1)) {
            (false, false) => return self.at,
            (true, _) => first,
            (false, true) => first + 1,
        };
        Position {
            line: self.at.line,
            column: (from + start + 1) as u32,
            length: length as u32,
        }
    }
}

#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize,
)]
pub struct Position {
    /// Line, counted from 1.
    pub line: u32,
    /// Column in characters, counted from 1.
    pub column: u32,
    /// Length in characters, for underlining.
    pub length: u32,
}

impl Position {
    pub fn of(location: serde_saphyr::Location) -> Self {
        let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        Self {
            line: narrow(location.line()),
            column: narrow(location.column()),
            length: narrow(location.span().len()),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Located<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = serde_saphyr::Spanned::<T>::deserialize(deserializer)?;
        Ok(Self {
            value: spanned.value,
            at: Position::of(spanned.referenced),
        })
    }
}

#[cfg(feature = "schema")]
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

/// One scalar, a list of scalars, or a map.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(untagged, inline, description = "")]
pub enum ListOr<T, M> {
    One(#[schemars(with = "T")] String),
    Many(#[schemars(length(min = 1))] Vec<T>),
    Map(M),
}

/// The schema of a [`ListOr`] that accepts no list.
#[cfg(feature = "schema")]
pub fn one_or_map<T: JsonSchema, M: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({ "anyOf": [generator.subschema_for::<T>(), generator.subschema_for::<M>()] })
}

/// Any value. The check interprets it, because the check can report its position.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(from = "serde_json::Value", inline, description = "")]
pub enum Tree {
    Nothing,
    One(String),
    Many(Vec<Located<Tree>>),
    /// In the order of the file.
    Map(Vec<(Located<String>, Located<Tree>)>),
}

/// The entries of a map in the order of the file. Keys have positions.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(from = "std::collections::BTreeMap<String, V>", inline)]
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

/// Methods of a visitor that turn each scalar into text.
macro_rules! scalars_as_text {
    ($($visit:ident($type:ty)),*) => {$(
        fn $visit<E: de::Error>(self, value: $type) -> Result<Self::Value, E> {
            Ok(ListOr::One(value.to_string()))
        }
    )*};
}

impl<'de, T: Deserialize<'de>, M: Deserialize<'de>> Deserialize<'de> for ListOr<T, M> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListOrVisitor<T, M>(PhantomData<(T, M)>);
        impl<'de, T: Deserialize<'de>, M: Deserialize<'de>> Visitor<'de> for ListOrVisitor<T, M> {
            type Value = ListOr<T, M>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a list of texts, or a map")
            }
            scalars_as_text!(
                visit_str(&str),
                visit_bool(bool),
                visit_u64(u64),
                visit_i64(i64),
                visit_f64(f64)
            );
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
        let given =
            Option::<ListOr<Located<Self>, Entries<Located<Self>>>>::deserialize(deserializer)?;
        Ok(match given {
            None => Self::Nothing,
            Some(ListOr::One(text)) => Self::One(text),
            Some(ListOr::Many(all)) => Self::Many(all),
            Some(ListOr::Map(Entries(entries))) => Self::Map(entries),
        })
    }
}

impl Located<Tree> {
    pub fn text(&self) -> Option<Located<String>> {
        match &self.value {
            Tree::One(text) => Some(self.with(text.clone())),
            Tree::Nothing | Tree::Many(_) | Tree::Map(_) => None,
        }
    }

    pub fn texts(&self) -> Option<Vec<Located<String>>> {
        match &self.value {
            Tree::Many(all) => all.iter().map(Self::text).collect(),
            _ => self.text().map(|text| vec![text]),
        }
    }
}

impl<T: Clone + From<Located<String>>, M> Located<ListOr<T, M>> {
    /// The texts of a scalar or of a list of scalars; `Err` with the map otherwise.
    pub fn texts(&self) -> Result<Vec<T>, &M> {
        match &self.value {
            ListOr::One(text) => Ok(vec![self.with(text.clone()).into()]),
            ListOr::Many(texts) => Ok(texts.clone()),
            ListOr::Map(map) => Err(map),
        }
    }
}
