//! [`Variant`]: a value that the file writes as a name, or as a map from a name to fields.

use std::{collections::BTreeMap, fmt, marker::PhantomData};

#[cfg(feature = "schema")]
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, MapDeserializer};
use serde::de::{
    self, DeserializeOwned, DeserializeSeed, Deserializer, Error, IgnoredAny, IntoDeserializer,
    MapAccess, Visitor,
};

use crate::error::{Problem, choices, quoted};
use crate::located::{Located, Position};

/// An enum whose variants have one field each, and whose names serde reads.
pub trait Variants: DeserializeOwned {
    /// As in `layer`.
    const NOUN: &'static str;
    /// As in `layers`.
    const NOUNS: &'static str;
    /// A variant with fields, as in `{ linear: { out: 10 } }`.
    const EXAMPLE: &'static str;

    fn is_known(name: &str) -> bool;

    #[cfg(feature = "schema")]
    fn schema(generator: &mut SchemaGenerator) -> Schema;
}

/// `gelu`, or `{ linear: { out: 10 } }`. A mistake is kept, because the check knows the position
/// and the names that are accepted.
#[derive(Clone, Debug)]
pub enum Variant<T> {
    /// Its name, and its fields.
    Known(String, T),
    /// A bare name has no position.
    Unknown(Located<String>),
    /// A name without the fields that it needs.
    Bare(String),
    /// A map without a name, or with several.
    NotOne,
}

impl<T: Variants> Variant<T> {
    pub fn of_name(name: &str) -> Self {
        if !T::is_known(name) {
            return Self::Unknown(Located {
                value: name.to_owned(),
                at: Position::default(),
            });
        }
        let bare = MapDeserializer::<_, de::value::Error>::new(
            [(name, BTreeMap::<&str, &str>::new())].into_iter(),
        );
        let fields = T::deserialize(MapAccessDeserializer::new(bare));
        fields.map_or_else(
            |_| Self::Bare(name.to_owned()),
            |fields| Self::Known(name.to_owned(), fields),
        )
    }

    /// The name and the fields, or the problem of the value at this position. `names` are accepted
    /// there.
    pub fn known(&self, at: Position, names: &[&str]) -> Result<(&str, &T), Problem> {
        let (noun, nouns) = (T::NOUN, T::NOUNS);
        Err(match self {
            Self::Known(name, fields) => return Ok((name, fields)),
            Self::Unknown(name) => {
                Problem::new(name.at, format!("unknown {noun} `{}`", name.value))
                    .or_at(at)
                    .help(choices(&name.value, nouns, names.iter().copied()))
            }
            Self::Bare(name) => Problem::new(at, format!("`{name}` needs fields"))
                .help(format!("write its fields in a map, as in `{}`", T::EXAMPLE)),
            Self::NotOne => Problem::new(at, format!("expected one {noun}"))
                .help(format!("write one of {}", quoted(names, ", "))),
        })
    }
}

impl<'de, T: Variants> Deserialize<'de> for Variant<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct VariantVisitor<T>(PhantomData<T>);
        impl<'de, T: Variants> Visitor<'de> for VariantVisitor<T> {
            type Value = Variant<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a {}, as in `{}`", T::NOUN, T::EXAMPLE)
            }
            fn visit_str<E: Error>(self, name: &str) -> Result<Self::Value, E> {
                Ok(Variant::of_name(name))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let Some(name) = map.next_key::<Located<String>>()? else {
                    return Ok(Variant::NotOne);
                };
                let variant = if T::is_known(&name.value) {
                    let entry = Entry {
                        name: Some(name.value.clone()),
                        map: &mut map,
                    };
                    Variant::Known(
                        name.value,
                        T::deserialize(MapAccessDeserializer::new(entry))?,
                    )
                } else {
                    map.next_value::<IgnoredAny>()?;
                    Variant::Unknown(name)
                };
                let mut is_one = true;
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    is_one = false;
                }
                Ok(if is_one { variant } else { Variant::NotOne })
            }
        }
        deserializer.deserialize_any(VariantVisitor(PhantomData))
    }
}

#[cfg(feature = "schema")]
impl<T: Variants> JsonSchema for Variant<T> {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        T::NOUN.into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        T::schema(generator)
    }
}

/// One entry of a map whose key has been read.
struct Entry<'m, A> {
    name: Option<String>,
    map: &'m mut A,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Entry<'_, A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        self.name
            .take()
            .map(|name| seed.deserialize(name.into_deserializer()))
            .transpose()
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        self.map.next_value_seed(seed)
    }
}
