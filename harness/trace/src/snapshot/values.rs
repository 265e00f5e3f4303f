//! Converts values of unknown keys from a pickle into [`Value`]s.

use std::collections::HashMap;

use super::budget::Budget;
use super::error::SnapshotError;
use super::extras::Value;
use super::pickle::{Item, Object, Objects};

/// Maximum nesting of lists and dictionaries; it also stops at circular objects. PyTorch nests two levels.
const MAX_DEPTH: usize = 32;

/// Converts `pairs`, in which keys and values alternate. The last value of a repeated key wins. Keys that are not texts appear as Python prints them.
pub(super) fn pairs(objects: &Objects, pairs: &[Item], budget: &mut Budget) -> Result<Vec<(String, Value)>, SnapshotError> {
    let mut converter = Converter { objects, budget };
    let mut set: Vec<(String, Value)> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    for pair in pairs.chunks_exact(2) {
        let key = match objects.text(pair[0]) {
            Some(text) => converter.text(text)?,
            None => objects.wrong(pair[0], "").found,
        };
        let value = converter.value(pair[1], 0)?;
        match places.get(&key) {
            Some(&place) => set[place].1 = value,
            None => {
                places.insert(key.clone(), set.len());
                set.push((key, value));
            }
        }
    }
    Ok(set)
}

struct Converter<'a> {
    objects: &'a Objects,
    budget: &'a mut Budget,
}

impl Converter<'_> {
    fn text(&mut self, text: &str) -> Result<String, SnapshotError> {
        self.take(text.len())?;
        Ok(text.to_owned())
    }

    /// Counts memory twice, which covers the overhead of many small allocations.
    fn take(&mut self, bytes: usize) -> Result<(), SnapshotError> {
        self.budget.take(2 * bytes)
    }

    fn value(&mut self, item: Item, depth: usize) -> Result<Value, SnapshotError> {
        self.take(size_of::<Value>())?;
        if depth > MAX_DEPTH {
            return Err(SnapshotError::TooLarge { what: "levels of nested lists and dictionaries", limit: MAX_DEPTH as u64 });
        }
        let (objects, deeper) = (self.objects, depth + 1);
        Ok(match item {
            Item::None => Value::None,
            Item::Bool(is_true) => Value::Bool(is_true),
            Item::Int(number) => Value::Int(number.into()),
            Item::Big(index) => Value::Int(objects.big(index)),
            Item::Float(bits) => Value::Float(bits),
            Item::Text(_) => Value::Text(self.text(objects.text(item).unwrap_or_default())?),
            Item::Bytes(index) => {
                self.take(objects.byte_string(index).len())?;
                Value::Bytes(objects.byte_string(index).to_vec())
            }
            Item::Tuple(index) => Value::Tuple(self.all(objects.tuple(index), deeper)?),
            Item::Object(_) => match objects.object(item) {
                Some(Object::Set(index)) => Value::Set(self.all(objects.set(index), deeper)?),
                Some(Object::Stack(stack)) => {
                    let frames = objects.stack_frames(stack).iter();
                    Value::List(frames.map(|&frame| self.frame(frame, deeper)).collect::<Result<_, _>>()?)
                }
                Some(Object::Frame(frame)) => self.frame(frame, deeper)?,
                // No version of PyTorch writes an event here.
                Some(Object::Event(_)) => Value::Text("an event".to_owned()),
                _ => match (objects.list(item), objects.dict(item)) {
                    (Some(items), _) => Value::List(self.all(items, deeper)?),
                    (None, pairs) => Value::Dict(in_pairs(self.all(pairs.unwrap_or_default(), deeper)?)),
                },
            },
        })
    }

    fn all(&mut self, items: &[Item], depth: usize) -> Result<Vec<Value>, SnapshotError> {
        items.iter().map(|&item| self.value(item, depth)).collect()
    }

    fn frame(&mut self, frame: u32, depth: usize) -> Result<Value, SnapshotError> {
        let frame = self.objects.frame(frame);
        let mut pairs = vec![Value::Text("name".to_owned()), self.value(Item::Text(frame.name), depth)?];
        pairs.extend([Value::Text("filename".to_owned()), self.value(Item::Text(frame.file), depth)?]);
        pairs.extend([Value::Text("line".to_owned()), Value::Int(frame.line.into())]);
        pairs.extend(self.all(self.objects.extra(frame.extra), depth)?);
        Ok(Value::Dict(in_pairs(pairs)))
    }
}

fn in_pairs(values: Vec<Value>) -> Vec<(Value, Value)> {
    let mut values = values.into_iter();
    std::iter::from_fn(|| values.next().zip(values.next())).collect()
}
