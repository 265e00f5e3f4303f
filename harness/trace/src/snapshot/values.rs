//! Values of a pickle that are none of the known keys, as [`Value`]s.

use super::error::SnapshotError;
use super::extras::Value;
use super::pickle::{Item, Object, Objects};

/// How deep lists and dictionaries may stand in each other. PyTorch's stand two deep.
const MAX_DEPTH: usize = 32;

/// Most values that are kept. A circular object would have more than any number of them, and a small file can share one list very often.
const MAX_VALUES: u64 = 1 << 22;

/// Converts values, and counts them.
#[derive(Default)]
pub(super) struct Values {
    made: u64,
}

impl Values {
    /// Keys and values in turn. Of a key that comes twice the last value counts; keys that are no texts are given as Python writes them.
    ///
    /// # Errors
    /// [`SnapshotError::TooLarge`]
    pub(super) fn pairs(&mut self, objects: &Objects, pairs: &[Item]) -> Result<Vec<(String, Value)>, SnapshotError> {
        let mut set: Vec<(String, Value)> = Vec::new();
        for pair in pairs.chunks_exact(2) {
            let key = match objects.text(pair[0]) {
                Some(text) => text.to_owned(),
                None => objects.wrong(pair[0], "").found,
            };
            let value = self.value(objects, pair[1], 0)?;
            match set.iter_mut().find(|(known, _)| *known == key) {
                Some(known) => known.1 = value,
                None => set.push((key, value)),
            }
        }
        Ok(set)
    }

    fn value(&mut self, objects: &Objects, item: Item, depth: usize) -> Result<Value, SnapshotError> {
        self.made += 1;
        if self.made > MAX_VALUES {
            return Err(SnapshotError::TooLarge { what: "values of keys that are not PyTorch's", limit: MAX_VALUES });
        }
        if depth > MAX_DEPTH {
            return Err(SnapshotError::TooLarge { what: "lists and dictionaries in each other", limit: MAX_DEPTH as u64 });
        }
        let deeper = depth + 1;
        Ok(match item {
            Item::None => Value::None,
            Item::Bool(is_true) => Value::Bool(is_true),
            Item::Int(number) => Value::Int(number.into()),
            Item::Big(index) => Value::Int(objects.big(index)),
            Item::Float(bits) => Value::Float(f64::from_bits(bits)),
            Item::Text(_) => Value::Text(objects.text(item).unwrap_or_default().to_owned()),
            Item::Bytes(index) => Value::Bytes(objects.byte_string(index).to_vec()),
            Item::Tuple(index) => Value::Tuple(self.all(objects, objects.tuple(index), deeper)?),
            Item::Object(_) => match objects.object(item) {
                Some(Object::Set(index)) => Value::Set(self.all(objects, objects.set(index), deeper)?),
                Some(Object::Stack(stack)) => {
                    let frames = objects.stack_frames(stack).iter();
                    Value::List(frames.map(|&frame| self.frame(objects, frame, deeper)).collect::<Result<_, _>>()?)
                }
                Some(Object::Frame(frame)) => self.frame(objects, frame, deeper)?,
                // Only where an event stands in a place that no version of PyTorch puts one.
                Some(Object::Event(_)) => Value::Text("an event".to_owned()),
                _ => match (objects.list(item), objects.dict(item)) {
                    (Some(items), _) => Value::List(self.all(objects, items, deeper)?),
                    (None, pairs) => {
                        let mut items = self.all(objects, pairs.unwrap_or_default(), deeper)?.into_iter();
                        Value::Dict(std::iter::from_fn(|| items.next().zip(items.next())).collect())
                    }
                },
            },
        })
    }

    fn all(&mut self, objects: &Objects, items: &[Item], depth: usize) -> Result<Vec<Value>, SnapshotError> {
        items.iter().map(|&item| self.value(objects, item, depth)).collect()
    }

    fn frame(&mut self, objects: &Objects, frame: u32, depth: usize) -> Result<Value, SnapshotError> {
        let frame = objects.frame(frame);
        let text = |text: &str| Value::Text(text.to_owned());
        let known = [
            (text("name"), text(objects.text(Item::Text(frame.name)).unwrap_or_default())),
            (text("filename"), text(objects.text(Item::Text(frame.file)).unwrap_or_default())),
            (text("line"), Value::Int(frame.line.into())),
        ];
        let mut unknown = self.all(objects, objects.extra(frame.extra), depth)?.into_iter();
        Ok(Value::Dict(known.into_iter().chain(std::iter::from_fn(|| unknown.next().zip(unknown.next()))).collect()))
    }
}
