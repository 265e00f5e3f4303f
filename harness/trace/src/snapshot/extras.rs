//! What a snapshot holds beyond the known keys: kept as it is in the file, so that writing it again loses nothing. PyTorch adds keys with most
//! versions (`compile_context`, `user_metadata`, `pool_id` …), and nearly all events have the same values there: equal sets of keys are kept once.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use std::fmt;

/// A value of a pickle that is none of the known keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum Value {
    None,
    Bool(bool),
    Int(i128),
    /// As its bits where it is serialized: JSON has no number that is none.
    Float(#[serde(with = "float_bits")] f64),
    Text(String),
    Bytes(Vec<u8>),
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Set(Vec<Value>),
    /// In the order of the file.
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
    /// The text, if it is one.
    #[must_use]
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The whole number, if it is one that fits.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Int(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }
}

/// Names a set of keys of [`Extras`]. [`ExtraId::NONE`] has no keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExtraId(pub u32);

impl ExtraId {
    /// No further keys.
    pub const NONE: Self = Self(0);
}

/// The further keys of segments, blocks, events, frames and annotations, each set of them once.
#[derive(Clone)]
pub struct Extras {
    sets: Vec<Vec<(String, Value)>>,
    /// By what [`fingerprint`] makes of it.
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
    /// The keys of a set with their values, in the order of the file. None for an id of other [`Extras`].
    #[must_use]
    pub fn get(&self, id: ExtraId) -> &[(String, Value)] {
        self.sets.get(id.0 as usize).map_or(&[], Vec::as_slice)
    }

    /// The value of one key of a set.
    #[must_use]
    pub fn value(&self, id: ExtraId, key: &str) -> Option<&Value> {
        self.get(id).iter().find_map(|(name, value)| (name == key).then_some(value))
    }

    /// How many different sets there are, the one without keys included. Their ids are the numbers below.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sets.len()
    }

    /// Whether there is no set but the one without keys.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 1
    }

    /// The id of a set of keys, which is kept if it is new.
    ///
    /// # Panics
    /// At 2^32 different sets.
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

/// Bytes that are equal for equal sets only.
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
