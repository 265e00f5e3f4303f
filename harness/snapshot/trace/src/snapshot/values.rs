//! Converts values of unknown keys from a pickle into [`Value`]s.

use indexmap::IndexMap;

use super::pickle::{Item, Object, Objects};
use super::{error::SnapshotError, extras::Value};

/// Maximum nesting of lists and dictionaries; it also stops at circular objects. PyTorch nests two
/// levels.
const MAX_DEPTH: usize = 32;

impl Objects {
    /// Converts alternating keys and values. The last value of a repeated key wins. Other keys than
    /// texts appear as in Python.
    pub(super) fn values(&self, pairs: &[Item]) -> Result<Vec<(String, Value)>, SnapshotError> {
        let mut set = IndexMap::new();
        for &[key, value] in pairs.as_chunks().0 {
            let key = match self.text(key) {
                Some(text) => self.copy(text)?,
                None => self.wrong(key, "").found,
            };
            set.insert(key, self.value(value, 0)?);
        }
        Ok(set.into_iter().collect())
    }

    fn copy(&self, text: &str) -> Result<String, SnapshotError> {
        self.take(text.len())?;
        Ok(text.to_owned())
    }

    /// Counts memory twice, which covers the overhead of many small allocations.
    fn take(&self, bytes: usize) -> Result<(), SnapshotError> {
        self.budget.take(2 * bytes)
    }

    fn value(&self, item: Item, depth: usize) -> Result<Value, SnapshotError> {
        self.take(size_of::<Value>())?;
        if depth > MAX_DEPTH {
            return Err(SnapshotError::TooLarge {
                what: "levels of nested lists and dictionaries",
                limit: MAX_DEPTH as u64,
            });
        }
        let deeper = depth + 1;
        Ok(match item {
            Item::None => Value::None,
            Item::Bool(is_true) => Value::Bool(is_true),
            Item::Int(number) => Value::Int(number.into()),
            Item::Big(index) => Value::Int(self.numbers[index as usize]),
            Item::Float(bits) => Value::Float(bits),
            Item::Text(_) => Value::Text(self.copy(self.text(item).unwrap_or_default())?),
            Item::Bytes(index) => {
                let bytes = &self.byte_strings[index as usize];
                self.take(bytes.len())?;
                Value::Bytes(bytes.to_vec())
            }
            Item::Tuple(index) => Value::Tuple(self.all(&self.tuples[index as usize], deeper)?),
            Item::Object(_) => match self.object(item) {
                Some(Object::Set(index)) => {
                    Value::Set(self.all(&self.sets[index as usize], deeper)?)
                }
                Some(Object::Stack(stack)) => {
                    let frames = self.stacks[stack.0 as usize].iter();
                    Value::List(
                        frames
                            .map(|&frame| self.frame_value(frame, deeper))
                            .collect::<Result<_, _>>()?,
                    )
                }
                Some(Object::Frame(frame)) => self.frame_value(frame, deeper)?,
                // No version of PyTorch writes an event here.
                Some(Object::Event(_)) => Value::Text("an event".to_owned()),
                _ => match (self.list(item), self.dict(item)) {
                    (Some(items), _) => Value::List(self.all(items, deeper)?),
                    (None, pairs) => {
                        Value::Dict(in_pairs(self.all(pairs.unwrap_or_default(), deeper)?))
                    }
                },
            },
        })
    }

    fn all(&self, items: &[Item], depth: usize) -> Result<Vec<Value>, SnapshotError> {
        items.iter().map(|&item| self.value(item, depth)).collect()
    }

    fn frame_value(&self, frame: u32, depth: usize) -> Result<Value, SnapshotError> {
        let frame = self.frames[frame as usize];
        let mut pairs = vec![
            Value::Text("name".to_owned()),
            self.value(Item::Text(frame.name), depth)?,
        ];
        pairs.extend([
            Value::Text("filename".to_owned()),
            self.value(Item::Text(frame.file), depth)?,
        ]);
        pairs.extend([
            Value::Text("line".to_owned()),
            Value::Int(frame.line.into()),
        ]);
        pairs.extend(self.all(&self.extras[frame.extra.0 as usize], depth)?);
        Ok(Value::Dict(in_pairs(pairs)))
    }
}

fn in_pairs(values: Vec<Value>) -> Vec<(Value, Value)> {
    let mut values = values.into_iter();
    std::iter::from_fn(|| values.next().zip(values.next())).collect()
}
