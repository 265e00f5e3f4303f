//! cuSPARSE: the sizes of the buffers for products of a matrix in CSR and a dense one.
//!
//! The formulas give all 224,784 sizes that cuSPARSE 12.6.3 reported on an H200 for the algorithms
//! that PyTorch uses, in six types with both sizes of indices. Other formats have no formula and
//! report 0.

use std::ffi::{c_int, c_longlong, c_void};

use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, write};

use crate::world::forget_output;

/// At the start of a descriptor of a matrix in CSR.
#[repr(C)]
#[derive(Clone, Copy)]
struct Matrix {
    rows: u64,
    columns: u64,
    nonzeros: u64,
    /// Bytes of an index. 0 in descriptors of other formats, which are zeros.
    index: u64,
    /// `cudaDataType_t`.
    kind: c_int,
}

/// At the start of a descriptor of a dense matrix.
#[repr(C)]
#[derive(Clone, Copy)]
struct Dense {
    columns: u64,
}

const CSR_ALG2: c_int = 6;

impl Matrix {
    /// Bytes of the buffer for the product with a dense matrix.
    fn with_matrix(&self, transposed: bool, dense: Dense, algorithm: c_int) -> u64 {
        if dense.columns == 1 || self.index == 0 {
            return self.with_vector(transposed);
        }
        match algorithm {
            CSR_ALG2 => self.index * self.nonzeros.div_ceil(24) + self.index - 1,
            _ => self.index * self.nonzeros.div_ceil(256) + 2 * self.index - 1,
        }
    }

    /// Bytes of the buffer for the product with a vector.
    fn with_vector(&self, transposed: bool) -> u64 {
        if self.index == 0 {
            return 0;
        }
        let is_half = matches!(self.kind, 2 | 14);
        // Nonzeros per block.
        let share = match (self.kind, self.index) {
            (0, 4) => 4096,
            (1, 4) => 3584,
            (0 | 1, _) => 3072,
            (4, 4) => 896,
            (4, _) => 512,
            (5, 4) => 384,
            (5, _) => 256,
            (_, 4) => 1024,
            _ => 896,
        };
        // A result in half precision is summed in single precision.
        let sums = if is_half {
            4 * if transposed { self.columns } else { self.rows } + 127
        } else {
            0
        };
        self.index * self.nonzeros.div_ceil(share) + 2 * self.index - 1 + sums
    }
}

fn count(number: c_longlong) -> u64 {
    // More do not fit in memory.
    number.clamp(0, 1 << 40).unsigned_abs()
}

export! {
    cusparseCreateCsr(
        matrix: Out<'_, *mut u8>, rows: c_longlong, columns: c_longlong, nonzeros: c_longlong,
        offsets: u64, columns_of: u64, values: u64, _: c_int, index: c_int, _: c_int, kind: c_int
    ) = {
        [offsets, columns_of, values].into_iter().for_each(forget_output);
        let [rows, columns, nonzeros] = [rows, columns, nonzeros].map(count);
        // `cusparseIndexType_t` is 2 for 32 bits and 3 for 64.
        let index = if index == 3 { 8 } else { 4 };
        describe(matrix, Matrix { rows, columns, nonzeros, index, kind })
    };
    cusparseCreateDnMat(
        matrix: Out<'_, *mut u8>, _: c_longlong, columns: c_longlong, _: c_longlong,
        values: u64, _: c_int, _: c_int
    ) = {
        forget_output(values);
        describe(matrix, Dense { columns: count(columns) })
    };
    cusparseSpMM_bufferSize(
        _: usize, operation: c_int, _: c_int, _: *const c_void, matrix: Option<&Matrix>, _: usize,
        _: *const c_void, result: Option<&Dense>, _: c_int, algorithm: c_int, bytes: Out<'_, u64>
    ) = answer(matrix.zip(result).is_some_and(|(matrix, result)| {
        write(bytes, matrix.with_matrix(operation != 0, *result, algorithm))
    }));
    cusparseSpMV_bufferSize(
        _: usize, operation: c_int, _: *const c_void, matrix: Option<&Matrix>, _: usize,
        _: *const c_void, _: usize, _: c_int, _: c_int, bytes: Out<'_, u64>
    ) = answer(matrix.is_some_and(|matrix| write(bytes, matrix.with_vector(operation != 0))));
    /// The product of dense matrices at the places of a sparse one. 96 % of 91,544 sizes were 1.
    cusparseSDDMM_bufferSize(
        _: usize, _: c_int, _: c_int, _: *const c_void, _: usize, _: usize, _: *const c_void,
        _: usize, _: c_int, _: c_int, bytes: Out<'_, u64>
    ) = answer(write(bytes, 1));
}

/// `cusparseStatus_t`: success, or an invalid value.
fn answer(is_valid: bool) -> c_int {
    if is_valid { 0 } else { 3 }
}

fn describe<T>(place: Out<'_, *mut u8>, description: T) -> c_int {
    let object = crate::objects::new_object();
    // SAFETY: objects are larger and aligned to 16 bytes, and nobody else has this one yet.
    unsafe { object.cast::<T>().write(description) };
    answer(write(place, object))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_products_are_as_measured_on_an_h200() {
        // Bytes of an index, type, nonzeros, rows, columns, algorithm, columns of the dense matrix,
        // transposed, bytes.
        for (index, kind, nonzeros, rows, columns, algorithm, dense, transposed, bytes) in [
            (8, 0, 99_825, 10_000, 3000, 6, 16, false, 33_287),
            (4, 2, 5936, 16, 371, 6, 2, false, 995),
            (4, 0, 99_825, 10_000, 3000, 4, 64, false, 1567),
            (8, 14, 311_296, 8192, 38, 4, 128, false, 9743),
            (8, 0, 395_187, 4096, 4096, 6, 1, false, 1047),
            (4, 1, 3_145_728, 48_304, 81_587, 4, 1, false, 3519),
            (8, 4, 3_145_728, 131_072, 25, 4, 1, true, 49_167),
            (4, 5, 3_145_728, 2799, 13_767, 4, 1, true, 32_775),
            (8, 2, 999_792, 50_000, 50_000, 6, 1, false, 209_070),
            (4, 2, 3_145_728, 33, 99_072, 4, 1, false, 12_554),
            (4, 14, 1792, 28, 64, 4, 1, true, 398),
        ] {
            let matrix = Matrix {
                rows,
                columns,
                nonzeros,
                index,
                kind,
            };
            assert_eq!(
                matrix.with_matrix(transposed, Dense { columns: dense }, algorithm),
                bytes,
                "{nonzeros} nonzeros, type {kind}"
            );
        }
    }

    #[test]
    fn other_formats_have_no_buffer() {
        // The descriptor of another format consists of zeros.
        let matrix = Matrix {
            rows: 0,
            columns: 0,
            nonzeros: 0,
            index: 0,
            kind: 0,
        };
        assert_eq!(
            [1, 4].map(|columns| matrix.with_matrix(false, Dense { columns }, CSR_ALG2)),
            [0; 2]
        );
    }
}
