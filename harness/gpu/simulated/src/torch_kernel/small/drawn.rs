//! Random numbers of small tensors: those that a GPU draws, from the seed and the offset of
//! PyTorch's generator.

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;

use super::choice::Elements;
use super::{Layout, MOST_ELEMENTS};
use crate::distributions::{self, Distribution, Filling};
use crate::random::{self, Draw};
use crate::torch_kernel::{DOUBLE, INT, Known, NONE, Value, get};
use crate::world::machine;

const FLOAT64: i32 = 7;
/// Threads of a block. A kernel for small tensors has one.
const THREADS: usize = 256;

/// Functions of PyTorch for generators of random numbers on a GPU.
#[repr(C)]
#[derive(Clone, Copy)]
struct Generators {
    /// The index of a tensor's device.
    device: unsafe extern "C" fn(*const usize, *mut i32) -> i32,
    /// The generator of a device, as the address of the address of its object.
    default: unsafe extern "C-unwind" fn(i8) -> *const usize,
    seed: unsafe extern "C" fn(usize) -> u64,
    offset: unsafe extern "C" fn(usize) -> u64,
    /// The version is older than 2.7.
    is_old: bool,
}

static GENERATORS: OnceLock<Generators> = OnceLock::new();

/// An operation that draws random numbers into its first tensor that changes, or into its results.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Draws {
    /// With its parameters.
    Numbers(Distribution),
    /// All integers of the type.
    Integers,
    IntegersFrom,
    IntegersTo,
    /// Flags with the probabilities that a tensor has.
    Flags,
    /// Normal numbers with the means or the deviations that tensors have.
    Normals,
    Dropout,
    Permutation,
}

/// What an operation draws.
pub(super) struct Drawing {
    draws: Draws,
    is_old: bool,
    /// Seed and offset.
    state: [u64; 2],
    /// Integers as bits.
    numbers: [Option<Value>; 2],
    tensors: [Option<Box<Elements>>; 2],
}

impl Draws {
    /// `None` if an operation draws nothing, or if PyTorch lacks a function.
    pub(super) fn of(name: &CStr, overload: &CStr) -> Option<Self> {
        GENERATORS.get()?;
        let name = name.to_bytes().strip_prefix(b"aten::")?;
        Some(match (name, overload.to_bytes()) {
            (b"uniform_", b"") => Self::Numbers(Distribution::Uniform),
            (b"normal_", b"") => Self::Numbers(Distribution::Normal),
            (b"log_normal_", b"") => Self::Numbers(Distribution::LogNormal),
            (b"cauchy_", b"") => Self::Numbers(Distribution::Cauchy),
            (b"exponential_", b"") => Self::Numbers(Distribution::Exponential),
            (b"geometric_", b"") => Self::Numbers(Distribution::Geometric),
            (b"bernoulli_", b"float") => Self::Numbers(Distribution::Bernoulli),
            (b"bernoulli_", b"Tensor") => Self::Flags,
            (b"random_", b"") => Self::Integers,
            (b"random_", b"from") => Self::IntegersFrom,
            (b"random_", b"to") => Self::IntegersTo,
            (b"normal", b"Tensor_float" | b"float_Tensor" | b"Tensor_Tensor") => Self::Normals,
            (b"native_dropout", b"") => Self::Dropout,
            (b"randperm", b"generator_out") => Self::Permutation,
            _ => return None,
        })
    }

    /// Reads the state of the generator and the arguments, before the GPU's kernel changes them.
    /// `None` if the numbers are not known.
    pub(super) fn begin(self, known: &Known, arguments: &[Value]) -> Option<Drawing> {
        let generators = GENERATORS.get()?;
        let mut all = known.tensors(arguments);
        let tensor = all.find(|value| known.is_on_gpu_and_defined(value))?;
        let (generator, arguments) = match (self, arguments) {
            (Self::Dropout, _) => (Value::new(NONE, 0), arguments),
            (Self::Permutation, [count, generator, _]) => (*generator, std::slice::from_ref(count)),
            (_, [arguments @ .., generator]) => (*generator, arguments),
            _ => return None,
        };
        let arguments = match self {
            Self::Numbers(_)
            | Self::Integers
            | Self::IntegersFrom
            | Self::IntegersTo
            | Self::Flags => &arguments[1..],
            _ => arguments,
        };
        // Dropout of an evaluation draws nothing.
        let trains = |value: &Value| value.tag == NONE || value.payload as u8 == 1;
        if self == Self::Dropout && !arguments.get(2).is_some_and(trains) {
            return None;
        }
        let state = generators.state(tensor, generator)?;
        let (mut numbers, mut tensors) = ([None; 2], [None, None]);
        for (index, argument) in arguments.iter().take(2).enumerate() {
            if known.torch.is_defined(*argument) {
                let elements = Elements::of(known, &machine().state(), argument)?;
                tensors[index] = Some(Box::new(elements));
            } else if [INT, DOUBLE].contains(&argument.tag) {
                numbers[index] = Some(*argument);
            }
        }
        Some(Drawing {
            draws: self,
            is_old: generators.is_old,
            state,
            numbers,
            tensors,
        })
    }
}

impl Generators {
    /// Seed and offset of a generator, or of the default one of a tensor's device. `None` if it is
    /// not of the GPU.
    fn state(&self, tensor: Value, generator: Value) -> Option<[u64; 2]> {
        let device = get(self.device, &tensor)?;
        // SAFETY: PyTorch has such a device, so it has a generator for it, which is never freed.
        // The first word of an object is the address of its virtual functions, so a generator with
        // those of the default one has its class. PyTorch keeps it during the call.
        unsafe {
            let default = (self.default)(i8::try_from(device).ok()?).read();
            let object = if generator.tag == NONE {
                default
            } else {
                generator.payload
            };
            let class = |object| std::ptr::with_exposed_provenance::<usize>(object).read();
            (class(object) == class(default)).then(|| [(self.seed)(object), (self.offset)(object)])
        }
    }
}

impl Drawing {
    /// Stores what the GPU's kernel has drawn, in its results.
    pub(super) fn store(self, known: &Known, results: &[Value]) {
        let layouts: Vec<Option<Layout>> = results
            .iter()
            .filter(|result| known.is_on_gpu_and_defined(result))
            .map(|result| Layout::of(known, result))
            .collect();
        let mut state = machine().state();
        let mut found = [[0; 16 * MOST_ELEMENTS as usize]; 2];
        let layouts: Option<Vec<Layout>> = layouts.into_iter().collect();
        let Some(layouts) = layouts else {
            // Too many dimensions.
            let ranges = results
                .iter()
                .filter_map(|result| known.known_range(result));
            return ranges.for_each(|(start, len)| state.copied.forget(start, len));
        };
        let is_drawn = layouts.iter().all(Layout::is_small) && self.draw(&layouts, &mut found);
        for (layout, found) in layouts.iter().zip(&found) {
            match is_drawn {
                // Kernels number the elements of a tensor by their addresses.
                true => by_address(layout).write(&mut state, found),
                false => layout.forget(&mut state),
            }
        }
    }

    /// Draws the elements of the results in the order of their addresses. Returns whether they are
    /// known.
    fn draw(&self, layouts: &[Layout], found: &mut [[u8; 16 * MOST_ELEMENTS as usize]; 2]) -> bool {
        let Some(layout) = layouts.first() else {
            return false;
        };
        let count = layout.elements() as usize;
        let [first, second] = found;
        let into = &mut first[..count * layout.element as usize];
        match (self.draws, layouts) {
            (Draws::Numbers(distribution), [_]) => self.numbers(distribution, layout, into),
            (Draws::Integers | Draws::IntegersFrom | Draws::IntegersTo, [_]) => {
                let range = self.integers(layout.scalar_type);
                range.map(|[least, count, is_long]| {
                    let filling = Filling {
                        least: least.cast_signed(),
                        count,
                        is_long: is_long == 1,
                        ..self.filling(Distribution::Integers, layout.scalar_type)
                    };
                    filling.fill(into, layout.elements() as usize);
                })
            }
            (Draws::Flags, [_]) => self.flags(layout, into),
            (Draws::Normals, [_]) => self.normals(layout, into),
            (Draws::Dropout, [_, kept]) if kept.elements() as usize == count => {
                self.dropout(layout, into, &mut second[..count])
            }
            (Draws::Permutation, [_]) if layout.is_dense() => {
                let order = distributions::permutation(self.state, THREADS, count, self.is_old);
                let elements = into.chunks_exact_mut(layout.element as usize);
                elements.zip(order).for_each(|(into, place)| {
                    distributions::store_integer(layout.scalar_type, place, into);
                });
                Some(())
            }
            _ => None,
        }
        .is_some()
    }

    const fn filling(&self, distribution: Distribution, scalar_type: i32) -> Filling {
        Filling {
            distribution: distribution as usize,
            scalar_type,
            is_long: false,
            threads: THREADS,
            state: self.state,
            parameters: [0.0; 2],
            least: 0,
            count: 0,
        }
    }

    /// A number among the parameters.
    fn number(&self, index: usize) -> Option<f64> {
        self.numbers[index].map(|number| match number.tag {
            INT => number.payload.cast_signed() as f64,
            _ => f64::from_bits(number.payload as u64),
        })
    }

    fn numbers(&self, distribution: Distribution, layout: &Layout, into: &mut [u8]) -> Option<()> {
        let mut parameters = [0, 1].map(|index| self.number(index).unwrap_or(0.0));
        let (mut scalar_type, mut count) = (layout.scalar_type, layout.elements() as usize);
        // The parts of a complex number.
        if let (Distribution::Normal, 8..=10) = (distribution, scalar_type) {
            scalar_type -= 3;
            count *= 2;
            parameters[1] /= 2.0_f64.sqrt();
        }
        // Integers may not hold the other numbers.
        let holds = distributions::is_real(scalar_type) || distribution == Distribution::Bernoulli;
        holds.then(|| {
            let filling = Filling {
                parameters,
                ..self.filling(distribution, scalar_type)
            };
            filling.fill(into, count);
        })
    }

    /// The least integer, how many there are (0 for all of 64 bits), and whether the kernel draws
    /// two words for each. `None` if the type may not hold them.
    fn integers(&self, scalar_type: i32) -> Option<[u64; 3]> {
        let digits = distributions::digits(scalar_type)?;
        let is_real = distributions::is_real(scalar_type);
        if self.draws == Draws::Integers {
            let count = match is_real {
                true => (1 << digits) + 1,
                false => 1_u64 << digits,
            };
            return Some([0, count, u64::from(digits > 32)]);
        }
        let number = |index: usize| self.numbers[index].map(|value| value.payload as i64);
        let (least, end) = match self.draws {
            Draws::IntegersTo => (0, number(0)?),
            _ if number(1).is_none() => {
                let are_all = number(0)? == i64::MIN && scalar_type == 4;
                return are_all.then_some([0, 0, 1]);
            }
            _ => (number(0)?, number(1)?),
        };
        let fits = |number: i64| !is_real || number.unsigned_abs() <= 1 << digits;
        let count = end.wrapping_sub(least).cast_unsigned();
        let is_long = if self.is_old {
            scalar_type != distributions::INT32 && count >= 1 << 32
        } else {
            count >= 1 << 28
        };
        (fits(least) && fits(end)).then(|| [least.cast_unsigned(), count, u64::from(is_long)])
    }

    /// The uniform numbers of kernels whose threads handle neighbouring elements.
    fn uniform(&self, count: usize, neighbours: usize, threads: usize) -> Vec<f64> {
        let [seed, offset] = self.state;
        let draw = Draw {
            neighbours,
            threads,
            seed,
            offset,
        };
        let mut numbers = vec![0.0; count];
        draw.fill(&mut numbers, |words| words.map(random::uniform));
        numbers.into_iter().map(f64::from).collect()
    }

    fn flags(&self, layout: &Layout, into: &mut [u8]) -> Option<()> {
        let chances = self.tensors[0].as_ref()?.reals_like(layout)?;
        let numbers = self.uniform(chances.len(), 4, chances.len());
        let elements = into.chunks_exact_mut(layout.element as usize);
        for (into, (number, chance)) in elements.zip(numbers.into_iter().zip(chances)) {
            let flag = f64::from(u8::from(number <= chance));
            distributions::store_real(layout.scalar_type, flag, into);
        }
        layout.is_dense().then_some(())
    }

    fn normals(&self, layout: &Layout, into: &mut [u8]) -> Option<()> {
        let scalar_type = layout.scalar_type;
        let filling = Filling {
            parameters: [0.0, 1.0],
            ..self.filling(Distribution::Normal, scalar_type)
        };
        let count = layout.elements() as usize;
        filling.fill(into, count);
        let parameters = |index: usize| match &self.tensors[index] {
            Some(tensor) => tensor.reals_like(layout),
            None => Some(vec![self.number(index)?; count]),
        };
        let [means, deviations] = [parameters(0)?, parameters(1)?];
        let elements = into.chunks_exact_mut(layout.element as usize);
        for (into, (mean, deviation)) in elements.zip(means.into_iter().zip(deviations)) {
            let number = distributions::real(into, scalar_type) * deviation;
            let sum = distributions::rounded(scalar_type, number) + mean;
            distributions::store_real(scalar_type, sum, into);
        }
        (layout.is_dense() && distributions::is_real(scalar_type)).then_some(())
    }

    fn dropout(&self, layout: &Layout, into: &mut [u8], kept: &mut [u8]) -> Option<()> {
        let tensor = self.tensors[0].as_ref()?;
        let values = tensor.reals_like(layout)?;
        let (count, size) = (values.len(), layout.element as usize);
        let most = if self.is_old { 4 } else { 16 / size };
        let address = tensor.layout.address as usize;
        let fits = |width: &usize| {
            *width <= most && count.is_multiple_of(*width) && address.is_multiple_of(width * size)
        };
        let neighbours = [8, 4, 2].into_iter().find(fits);
        let neighbours = neighbours.filter(|_| tensor.layout.is_dense()).unwrap_or(1);
        let is_double = layout.scalar_type == FLOAT64;
        let round = |number: f64| {
            if is_double {
                number
            } else {
                f64::from(number as f32)
            }
        };
        let chance = round(1.0 - self.number(1)?);
        let scale = round(1.0 / chance);
        let numbers = self.uniform(count, neighbours, THREADS);
        let elements = into
            .chunks_exact_mut(size)
            .zip(kept)
            .zip(numbers.into_iter().zip(values));
        for ((into, kept), (number, value)) in elements {
            *kept = u8::from(number < chance);
            let number = value * f64::from(*kept) * scale;
            let number = if chance > 0.0 { number } else { 0.0 };
            distributions::store_real(layout.scalar_type, number, into);
        }
        (layout.is_dense() && distributions::is_real(layout.scalar_type)).then_some(())
    }
}

/// The layout whose indices are in the order of the addresses.
fn by_address(layout: &Layout) -> Layout {
    let mut order: Vec<usize> = (0..layout.dimensions).collect();
    order.sort_by_key(|dimension| std::cmp::Reverse(layout.strides[*dimension]));
    let mut sorted = *layout;
    for (place, dimension) in order.into_iter().enumerate() {
        sorted.sizes[place] = layout.sizes[dimension];
        sorted.strides[place] = layout.strides[dimension];
    }
    sorted
}

/// Computes random numbers of small tensors from now on.
///
/// # Safety
/// The functions are those of PyTorch.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_small_random(generators: *const c_void) {
    // SAFETY: as the caller promises.
    let generators = unsafe { generators.cast::<Generators>().read() };
    let _ = GENERATORS.set(generators);
}

#[cfg(test)]
mod tests {
    use super::{Drawing, Draws};
    use crate::distributions::INT32;
    use crate::torch_kernel::{INT, Value};

    #[test]
    fn before_torch_2_7_integers_of_32_bits_are_one_word_in_any_range() {
        let words = |is_old, scalar_type| {
            let bound = |number: i64| Some(Value::new(INT, number as usize));
            let drawing = Drawing {
                draws: Draws::IntegersFrom,
                is_old,
                state: [0; 2],
                numbers: [bound(-(1 << 31)), bound(1 << 31)],
                tensors: [None, None],
            };
            drawing
                .integers(scalar_type)
                .map(|[_, _, is_long]| 1 + is_long)
        };
        let int64 = 4;
        let found = [(true, INT32), (true, int64), (false, INT32)];
        assert_eq!(
            found.map(|(is_old, of)| words(is_old, of)),
            [Some(1), Some(2), Some(2)]
        );
    }
}
