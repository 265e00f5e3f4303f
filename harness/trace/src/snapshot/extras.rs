//! Stores keys of a snapshot that this crate does not know, so writing the snapshot again preserves them. Most PyTorch versions
//! add keys (`compile_context`, `user_metadata`, `pool_id` …). Their values repeat in nearly all events, so each distinct set of
//! keys is stored once.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use std::fmt;

/// A value of an unknown key in a pickle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Value {
    None,
    Bool(bool),
    Int(i128),
    /// Serialized as its bits, because JSON has no NaN.
    Float(#[serde(with = "float_bits")] f64),
    Text(String),
    Bytes(Vec<u8>),
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Set(Vec<Value>),
    /// In file order.
    Dict(Vec<(Value, Value)>),
}

mod float_bits {
    use serde::{Deserialize, Deserializer, Serializer};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    pub(super) fn serialize<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(number.to_bits())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        u64::deserialize(deserializer).map(f64::from_bits)
    }
}

impl Value {
    #[must_use]
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The whole number, if the value is one and fits.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Int(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }
}

/// Identifies a set of keys in [`Extras`]. [`ExtraId::NONE`] has no keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExtraId(pub u32);

impl ExtraId {
    pub const NONE: Self = Self(0);
}

/// The distinct sets of unknown keys of segments, blocks, events, frames and annotations.
#[derive(Clone)]
pub struct Extras {
    sets: Vec<Vec<(String, Value)>>,
    /// Keyed by [`fingerprint`].
    ids: HashMap<Vec<u8>, ExtraId>,
}

impl Default for Extras {
    fn default() -> Self {
        let mut extras = Self { sets: Vec::new(), ids: HashMap::new() };
        extras.intern(Vec::new());
        extras
    }
}

impl fmt::Debug for Extras {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Extras").field(&self.sets).finish()
    }
}

impl PartialEq for Extras {
    fn eq(&self, other: &Self) -> bool {
        self.sets == other.sets
    }
}

impl Extras {
    /// The keys and values of a set, in file order. Empty for an unknown id.
    #[must_use]
    pub fn get(&self, id: ExtraId) -> &[(String, Value)] {
        self.sets.get(id.0 as usize).map_or(&[], Vec::as_slice)
    }

    #[must_use]
    pub fn value(&self, id: ExtraId, key: &str) -> Option<&Value> {
        self.get(id).iter().find_map(|(name, value)| (name == key).then_some(value))
    }

    /// The number of distinct sets, including the empty one. Ids are smaller than this.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sets.len()
    }

    /// Returns true if only the empty set exists.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 1
    }

    /// Stores a set of keys if it is new, and returns its id.
    ///
    /// # Panics
    /// Panics at 2^32 distinct sets.
    pub fn intern(&mut self, set: Vec<(String, Value)>) -> ExtraId {
        let key = fingerprint(&set);
        if let Some(&id) = self.ids.get(&key) {
            return id;
        }
        let id = ExtraId(u32::try_from(self.sets.len()).expect("fewer than 2^32 different sets"));
        self.sets.push(set);
        self.ids.insert(key, id);
        id
    }
}

/// Encodes a set. Different sets have different encodings.
fn fingerprint(set: &[(String, Value)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (key, value) in set {
        sized(&mut bytes, b'k', key.as_bytes());
        value_bytes(&mut bytes, value);
    }
    bytes
}

fn value_bytes(bytes: &mut Vec<u8>, value: &Value) {
    match value {
        Value::None => bytes.push(b'n'),
        Value::Bool(is_true) => bytes.extend([b'b', u8::from(*is_true)]),
        Value::Int(number) => sized(bytes, b'i', &number.to_le_bytes()),
        Value::Float(number) => sized(bytes, b'f', &number.to_bits().to_le_bytes()),
        Value::Text(text) => sized(bytes, b't', text.as_bytes()),
        Value::Bytes(content) => sized(bytes, b'y', content),
        Value::List(items) => items_bytes(bytes, b'l', items.iter(), items.len()),
        Value::Tuple(items) => items_bytes(bytes, b'u', items.iter(), items.len()),
        Value::Set(items) => items_bytes(bytes, b's', items.iter(), items.len()),
        Value::Dict(pairs) => items_bytes(bytes, b'd', pairs.iter().flat_map(|(key, value)| [key, value]), pairs.len()),
    }
}

fn items_bytes<'a>(bytes: &mut Vec<u8>, kind: u8, items: impl Iterator<Item = &'a Value>, count: usize) {
    sized(bytes, kind, &count.to_le_bytes());
    items.for_each(|item| value_bytes(bytes, item));
}

fn sized(bytes: &mut Vec<u8>, kind: u8, content: &[u8]) {
    bytes.push(kind);
    bytes.extend(content.len().to_le_bytes());
    bytes.extend(content);
}
