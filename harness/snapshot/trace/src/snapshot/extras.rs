//! Stores keys of a snapshot that this crate does not know, so writing the snapshot again preserves
//! them. Most PyTorch versions add keys (`compile_context`, `user_metadata`, `pool_id` …). Their
//! values repeat in nearly all events, so each distinct set of keys is stored once.

use indexmap::IndexSet;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Value {
    None,
    Bool(bool),
    Int(i128),
    /// The bits of an `f64`, so that equal sets of keys have equal values, also with NaN.
    Float(u64),
    Text(String),
    Bytes(Vec<u8>),
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Set(Vec<Value>),
    /// In file order.
    Dict(Vec<(Value, Value)>),
}

impl Value {
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The value of a key, if the value is a dictionary that has it.
    pub fn get(&self, name: &str) -> Option<&Self> {
        let Self::Dict(pairs) = self else { return None };
        let pair = pairs.iter().find(|(key, _)| key.as_text() == Some(name));
        pair.map(|(_, value)| value)
    }

    /// The whole number, if the value is one and fits.
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
#[derive(Clone, Debug)]
pub struct Extras(IndexSet<Vec<(String, Value)>>);

impl Default for Extras {
    fn default() -> Self {
        Self(IndexSet::from([Vec::new()]))
    }
}

/// Equal sets have equal ids.
impl PartialEq for Extras {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_slice() == other.0.as_slice()
    }
}

impl Extras {
    pub fn get(&self, id: ExtraId) -> &[(String, Value)] {
        self.0.get_index(id.0 as usize).map_or(&[], Vec::as_slice)
    }

    pub fn value(&self, id: ExtraId, key: &str) -> Option<&Value> {
        self.get(id)
            .iter()
            .find_map(|(name, value)| (name == key).then_some(value))
    }

    pub fn intern(&mut self, set: Vec<(String, Value)>) -> ExtraId {
        ExtraId(self.0.insert_full(set).0 as u32)
    }
}
