//! Common operations on few numbers, without the CPU's kernel, which would take most of the time:
//! fills, and the increments of counters, as of batch normalization.

use std::ffi::CStr;
use std::ptr;

use super::{Layout, MOST_ELEMENTS};
use crate::torch_kernel::{DOUBLE, INT, Known, Value, element_size, get};
use crate::world::machine;

const INT32: i32 = 3;
const INT64: i32 = 4;
const FLOAT32: i32 = 6;
const FLOAT64: i32 = 7;

/// An operation that changes its first argument.
#[derive(Clone, Copy)]
pub(super) enum Direct {
    Fill,
    Zero,
    Add,
}

/// The bytes of each element of the result.
pub(super) struct Number {
    bytes: [u8; 16],
    scalar_type: i32,
}

impl Direct {
    pub(super) fn of(name: &CStr, overload: &CStr) -> Option<Self> {
        match (name.to_bytes(), overload.to_bytes()) {
            (b"aten::fill_", b"Scalar") => Some(Self::Fill),
            (b"aten::zero_", b"") => Some(Self::Zero),
            (b"aten::add_", b"Tensor") => Some(Self::Add),
            _ => None,
        }
    }

    /// Returns the result. `None` if the CPU's kernel has to compute it.
    pub(super) fn compute(self, known: &Known, arguments: &[Value]) -> Option<Number> {
        let scalar_type = known.scalar_type(arguments.first()?);
        let mut bytes = [0; 16];
        match (self, arguments) {
            (Self::Zero, [_]) => {}
            (Self::Fill, [_, number]) => {
                let is_float = number.tag == DOUBLE;
                let (int, float) = (number.payload as i64, f64::from_bits(number.payload as u64));
                match scalar_type {
                    INT32 if number.tag == INT => {
                        put(&mut bytes, i32::try_from(int).ok()?.to_ne_bytes())
                    }
                    INT64 if number.tag == INT => put(&mut bytes, int.to_ne_bytes()),
                    FLOAT32 if is_float => put(&mut bytes, (float as f32).to_ne_bytes()),
                    FLOAT32 if number.tag == INT => put(&mut bytes, (int as f32).to_ne_bytes()),
                    FLOAT64 if is_float => put(&mut bytes, float.to_ne_bytes()),
                    FLOAT64 if number.tag == INT => put(&mut bytes, (int as f64).to_ne_bytes()),
                    _ => return None,
                }
            }
            (Self::Add, [to, other, factor]) if scalar_type == INT64 && factor.tag == INT => {
                let product = integer(known, other)?.wrapping_mul(factor.payload as i64);
                let sum = integer(known, to)?.wrapping_add(product);
                put(&mut bytes, sum.to_ne_bytes());
            }
            _ => return None,
        }
        Some(Number { bytes, scalar_type })
    }
}

fn put<const N: usize>(bytes: &mut [u8; 16], number: [u8; N]) {
    bytes[..N].copy_from_slice(&number);
}

/// The value of a tensor with one integer, if it is known.
fn integer(known: &Known, tensor: &Value) -> Option<i64> {
    let torch = &known.torch;
    if !torch.is_defined(*tensor)
        || known.elements(tensor) != 1
        || known.scalar_type(tensor) != INT64
    {
        return None;
    }
    let address: usize = get(torch.address, tensor)?;
    if known.is_on_gpu(tensor)? {
        let mut bytes = [0; 8];
        let is_known = machine()
            .state()
            .copied
            .read_all(address as u64, &mut bytes);
        return is_known.then(|| i64::from_ne_bytes(bytes));
    }
    // SAFETY: a tensor of the CPU with one element.
    Some(unsafe { ptr::with_exposed_provenance::<i64>(address).read_unaligned() })
}

impl Number {
    /// Stores the elements of the changed tensor.
    pub(super) fn store(self, known: &Known, tensor: &Value) {
        let Some(layout) = Layout::of(known, tensor) else {
            return;
        };
        let mut state = machine().state();
        let size = element_size(self.scalar_type).map_or(0, |size| size as usize);
        if layout.scalar_type != self.scalar_type || !layout.is_small() {
            return layout.forget(&mut state);
        }
        let mut all = [0; 16 * MOST_ELEMENTS as usize];
        let count = layout.elements() as usize;
        for element in all.chunks_exact_mut(size.max(1)).take(count) {
            element.copy_from_slice(&self.bytes[..size]);
        }
        layout.write(&mut state, &all[..count * size]);
    }
}
