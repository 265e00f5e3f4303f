//! Results for which a GPU may choose in another way than the CPU: the indices of equal elements,
//! the last one of several writes to an element, the order in which a kernel changes overlapping
//! tensors of a list, the precision of some sums, and integers for numbers that they cannot hold.
//! They are not known.

use super::{INT, Layout, MOST_ELEMENTS, Operation, TENSOR, range};
use crate::distributions::{is_real, real};
use crate::torch_kernel::{Known, Value};
use crate::world::State;

/// Types of `c10::ScalarType`.
const FLOAT16: i32 = 5;
const BFLOAT16: i32 = 15;
const FLOAT32: i32 = 6;
const FLOAT64: i32 = 7;

/// How results may depend on a choice. Its indices are those of `small_values`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    None,
    /// The second result has the indices of the elements that the first one has.
    Ties,
    /// Elements of an argument are written to places that another argument has.
    Writes,
    /// Elements of an argument are added there. A sum in 16 bits depends on the order so much that
    /// more than its last bits differ.
    Sums,
    /// Numbers are converted. The GPU and the CPU give other integers for numbers that the type
    /// cannot hold.
    Casts,
    /// Each element adds to a sum of the earlier ones, in 16 bits on the GPU only.
    Scans,
}

impl Choice {
    pub(super) const ALL: [Self; 6] = [
        Self::None,
        Self::Ties,
        Self::Writes,
        Self::Sums,
        Self::Casts,
        Self::Scans,
    ];
}

/// The rows of a tensor along a dimension: the elements of each are `inner` apart.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    size: usize,
    inner: usize,
}

impl Rows {
    fn of(sizes: &[i64], dimension: i64) -> Option<Self> {
        let from_end = if dimension < 0 { sizes.len() as i64 } else { 0 };
        let dimension = usize::try_from(dimension + from_end).ok()?;
        Some(Self {
            size: sizes.get(dimension).map_or(1, |size| *size as usize),
            inner: sizes.iter().skip(dimension + 1).product::<i64>() as usize,
        })
    }

    /// The row of an element.
    const fn row(self, element: usize) -> usize {
        element / (self.inner * self.size) * self.inner + element % self.inner
    }
}

/// The elements of a small tensor in their order.
pub(super) struct Elements {
    bytes: [u8; 16 * MOST_ELEMENTS as usize],
    pub(super) layout: Layout,
}

impl Elements {
    /// `None` if the tensor is large, or not all elements are known.
    pub(super) fn of(known: &Known, state: &State, tensor: &Value) -> Option<Self> {
        let layout = Layout::of(known, tensor).filter(Layout::is_small)?;
        let mut bytes = [0; 16 * MOST_ELEMENTS as usize];
        if known.is_on_gpu(tensor)? {
            return layout
                .read(state, &mut bytes)
                .then_some(Self { bytes, layout });
        }
        layout.with_bytes_of_cpu(|from| {
            let size = from.len().min(bytes.len());
            bytes[..size].copy_from_slice(&from[..size]);
        });
        Some(Self { bytes, layout })
    }

    fn all(&self) -> impl Iterator<Item = &[u8]> {
        let elements = self.bytes.chunks_exact(self.layout.element as usize);
        elements.take(self.layout.elements() as usize)
    }

    fn are_equal(&self) -> bool {
        let mut elements = self.all();
        let first = elements.next();
        elements.all(|element| Some(element) == first)
    }

    /// The floating-point numbers for each element of a tensor of this shape. `None` for other
    /// types, and unless the shapes are equal or the tensor has one element.
    pub(super) fn reals_like(&self, layout: &Layout) -> Option<Vec<f64>> {
        let scalar_type = self.layout.scalar_type;
        let reals = self.all().map(|element| real(element, scalar_type));
        let reals: Vec<f64> = reals.filter(|_| is_real(scalar_type)).collect();
        let count = layout.elements() as usize;
        match &reals[..] {
            [only] => Some(vec![*only; count]),
            all if all.len() == count && self.layout.sizes() == layout.sizes() => Some(reals),
            _ => None,
        }
    }

    /// The elements as indices. `None` for flags.
    fn indices(&self) -> Option<Vec<i64>> {
        let index = |bytes: &[u8]| match bytes.len() {
            4 => bytes.try_into().map(i32::from_ne_bytes).map(i64::from),
            _ => bytes.try_into().map(i64::from_ne_bytes),
        };
        self.all().map(|bytes| index(bytes).ok()).collect()
    }
}

/// Returns whether two places are the same, or may be, because negative ones count from the end.
fn has_equal<T: Ord>(mut places: Vec<T>, indices: impl Iterator<Item = i64>) -> bool {
    let [mut is_negative, mut is_positive] = [false; 2];
    indices.for_each(|index| {
        *(if index < 0 {
            &mut is_negative
        } else {
            &mut is_positive
        }) = true
    });
    places.sort_unstable();
    places.windows(2).any(|pair| pair[0] == pair[1]) || (is_negative && is_positive)
}

/// A word that elements of a type have in common if a sort takes them for equal: zeros of both
/// signs, and all that are no numbers.
fn order(element: &[u8], scalar_type: i32) -> u64 {
    let mut word = [0; 8];
    let size = element.len().min(word.len());
    word[..size].copy_from_slice(&element[..size]);
    let word = u64::from_ne_bytes(word);
    let infinity = match scalar_type {
        FLOAT16 => 0x7c00,
        BFLOAT16 => 0x7f80,
        FLOAT32 => u64::from(f32::INFINITY.to_bits()),
        FLOAT64 => f64::INFINITY.to_bits(),
        _ => return word,
    };
    let magnitude = word & !(1 << (8 * size - 1));
    match magnitude {
        0 => 0,
        magnitude if magnitude > infinity => infinity + 1,
        _ => word,
    }
}

impl Operation {
    /// Returns whether all results depend on a choice.
    pub(super) fn chooses(&self, known: &Known, state: &State, arguments: &[Value]) -> bool {
        let is_true = |value: &Value| value.tag == known.bool_tag && value.payload as u8 == 1;
        let chooses = match (self.choice, arguments) {
            (Choice::None, _) => false,
            // `topk` in any order.
            (Choice::Ties, [_, count, dimension, _, is_sorted, ..])
                if [count, dimension].iter().all(|number| number.tag == INT) =>
            {
                count.payload > 1 && is_sorted.tag == known.bool_tag && !is_true(is_sorted)
            }
            (Choice::Ties, _) => false,
            (Choice::Writes | Choice::Sums, _) => self.collides(known, state, arguments),
            (Choice::Casts, _) => casts_beyond(known, state, arguments),
            (Choice::Scans, [tensor, ..]) => is_half(known.scalar_type(tensor)),
            (Choice::Scans, []) => false,
        };
        chooses || self.races(known, arguments)
    }

    /// Returns whether the result depends on the order of writes or of additions.
    fn collides(&self, known: &Known, state: &State, arguments: &[Value]) -> bool {
        let (dimension, indices, source, adds) = match arguments {
            [_, dimension, index, source, ..] if dimension.tag == INT => {
                (Some(*dimension), index, source, self.choice == Choice::Sums)
            }
            // Gradients of rows, their indices, and the number of rows.
            [source, indices, count, ..] if self.choice == Choice::Sums && count.tag == INT => {
                (None, indices, source, true)
            }
            [_, indices, source, adds, ..] => {
                let adds = adds.tag == known.bool_tag && adds.payload as u8 == 1;
                (None, indices, source, adds)
            }
            _ => return true,
        };
        if !known.torch.is_defined(*source) {
            return false; // A number.
        }
        let is_open = match adds {
            true => is_half(known.scalar_type(source)),
            false => {
                !Elements::of(known, state, source).is_some_and(|elements| elements.are_equal())
            }
        };
        is_open && may_write_twice(known, state, dimension, indices)
    }

    /// The rows among whose elements the GPU may choose other equal ones.
    pub(super) fn ties(&self, known: &Known, arguments: &[Value]) -> Option<Rows> {
        let (tensor, rest) = arguments
            .split_first()
            .filter(|_| self.choice == Choice::Ties)?;
        let is_stable = matches!(rest, [stable, ..]
            if stable.tag == known.bool_tag && stable.payload as u8 == 1);
        let mut numbers = rest.iter().filter(|argument| argument.tag == INT);
        let dimension = numbers.next_back().filter(|_| !is_stable)?;
        Rows::of(known.shape(tensor)[0], dimension.payload as i64)
    }

    /// Returns whether a tensor of a list that changes overlaps another one, but for one at the
    /// same index of another list.
    fn races(&self, known: &Known, arguments: &[Value]) -> bool {
        let is_changed = |index: usize| self.changed & 1 << index != 0;
        let mut lists = arguments.iter().enumerate();
        if !lists.any(|(index, argument)| is_changed(index) && known.list(argument).is_some()) {
            return false;
        }
        let mut ranges = Vec::new();
        for (index, argument) in arguments.iter().enumerate() {
            let is_list = known.list(argument).is_some();
            for (place, tensor) in known.elements_of(argument).iter().enumerate() {
                if known.is_on_gpu_and_defined(tensor)
                    && let Some(layout) = Layout::of(known, tensor)
                    && let Some((start, len)) = range_of(&layout)
                {
                    let place = is_list.then_some(place);
                    ranges.push((start, start + len, place, is_changed(index)));
                }
            }
        }
        ranges.sort_unstable();
        let mut earlier: Option<(u64, u64, Option<usize>, bool)> = None;
        for (start, end, place, is_changed) in ranges {
            match &mut earlier {
                Some((first, last, of, changes)) if start < *last => {
                    let is_same = (start, end, place) == (*first, *last, *of) && place.is_some();
                    if !is_same && (is_changed || *changes) {
                        return true;
                    }
                    *changes |= is_changed;
                    *last = end.max(*last);
                }
                _ => earlier = Some((start, end, place, is_changed)),
            }
        }
        false
    }
}

fn is_half(scalar_type: i32) -> bool {
    [FLOAT16, BFLOAT16].contains(&scalar_type)
}

/// The bits of an integer type, and whether it has a sign.
const fn integer(scalar_type: i32) -> Option<(i32, bool)> {
    match scalar_type {
        0 => Some((8, false)),
        1 => Some((8, true)),
        2 => Some((16, true)),
        3 => Some((32, true)),
        4 => Some((64, true)),
        27 => Some((16, false)),
        28 => Some((32, false)),
        29 => Some((64, false)),
        _ => None,
    }
}

/// Returns whether `copy_`, `_foreach_copy_` or `_to_copy` converts a number that its integer type
/// cannot hold.
fn casts_beyond(known: &Known, state: &State, arguments: &[Value]) -> bool {
    match arguments {
        [source, to, ..] if to.tag == INT => holds_beyond(known, state, source, to.payload as i32),
        [to, source, ..] => {
            let pairs = (known.elements_of(to).iter()).zip(known.elements_of(source));
            pairs
                .filter(|(to, source)| to.tag == TENSOR && source.tag == TENSOR)
                .any(|(to, source)| holds_beyond(known, state, source, known.scalar_type(to)))
        }
        _ => false,
    }
}

/// Returns whether a tensor has a floating-point number that an integer type cannot hold. Without
/// known elements, nothing is computed.
fn holds_beyond(known: &Known, state: &State, tensor: &Value, to: i32) -> bool {
    let from = known.scalar_type(tensor);
    let is_float = [FLOAT16, BFLOAT16, FLOAT32, FLOAT64].contains(&from);
    let Some((bits, has_sign)) = integer(to).filter(|_| is_float) else {
        return false;
    };
    let (least, limit) = match has_sign {
        true => (-2f64.powi(bits - 1), 2f64.powi(bits - 1)),
        false => (0.0, 2f64.powi(bits)),
    };
    Elements::of(known, state, tensor).is_some_and(|elements| {
        let mut numbers = elements.all().map(|element| real(element, from).trunc());
        numbers.any(|number| !(least..limit).contains(&number))
    })
}

fn range_of(layout: &Layout) -> Option<(u64, u64)> {
    let strides = &layout.strides[..layout.dimensions];
    range(layout.address, layout.element, layout.sizes(), strides)
}

/// Returns whether indices may name a place twice.
fn may_write_twice(
    known: &Known,
    state: &State,
    dimension: Option<Value>,
    indices: &Value,
) -> bool {
    let tensors = known.elements_of(indices).iter();
    let tensors = tensors.filter(|tensor| known.torch.is_defined(**tensor));
    let elements: Option<Vec<Elements>> = tensors
        .map(|tensor| Elements::of(known, state, tensor))
        .collect();
    let Some(elements) = elements else {
        return true;
    };
    let indices: Vec<Vec<i64>> = elements.iter().filter_map(Elements::indices).collect();
    if let (Some(dimension), [index], [elements]) = (dimension, &indices[..], &elements[..]) {
        let rows = Rows::of(elements.layout.sizes(), dimension.payload as i64)
            .filter(|_| elements.layout.dimensions > 1);
        let row = |element: usize| rows.map_or(0, |rows| rows.row(element));
        let places = index
            .iter()
            .enumerate()
            .map(|(element, index)| (row(element), *index));
        return has_equal(places.collect(), index.iter().copied());
    }
    // Tensors of one shape name places together. If each has distinct elements, so have the places
    // that they name in any shapes.
    let are_alike = elements.len() == indices.len()
        && elements
            .windows(2)
            .all(|pair| pair[0].layout.sizes() == pair[1].layout.sizes());
    if are_alike {
        let count = indices.first().map_or(0, Vec::len);
        let place = |element| {
            indices
                .iter()
                .map(|index| index[element])
                .collect::<Vec<i64>>()
        };
        return has_equal(
            (0..count).map(place).collect(),
            indices.into_iter().flatten(),
        );
    }
    indices
        .into_iter()
        .any(|index| has_equal(index.clone(), index.into_iter()))
}

impl Rows {
    /// Forgets the indices of elements that equal others of their row, and the elements if they
    /// differ from these in their bytes. `elements` and `found` are those of the argument and of
    /// the first result, whose layout is the first one.
    pub(super) fn forget_ties(
        self,
        state: &mut State,
        [values, indices]: [&Layout; 2],
        elements: &[u8],
        found: &[u8],
    ) {
        let size = values.element as usize;
        let per_row = values.elements() as usize * self.size;
        let count = elements.len() / size;
        let of_results = Self {
            size: per_row.checked_div(count).unwrap_or(0),
            ..self
        };
        let word = |element: &[u8]| order(element, values.scalar_type);
        let [mut places, mut index_places] = [Vec::new(), Vec::new()];
        values.each(|offset| places.push(values.address + offset));
        indices.each(|offset| index_places.push(indices.address + offset));
        for (place, value) in found.chunks_exact(size).take(places.len()).enumerate() {
            let row = of_results.row(place);
            let equal = elements
                .chunks_exact(size)
                .enumerate()
                .filter(|(element, other)| self.row(*element) == row && word(other) == word(value));
            let equal: Vec<&[u8]> = equal.map(|(_, other)| other).collect();
            if equal.len() > 1 {
                state.copied.forget(index_places[place], indices.element);
            }
            if equal.iter().any(|other| *other != value) {
                state.copied.forget(places[place], values.element);
            }
        }
    }
}
