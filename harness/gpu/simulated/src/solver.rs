//! cuSOLVER: the sizes of workspaces.
//!
//! The formulas give the 111,000 sizes that cuSOLVER 12.0.4 of CUDA 13.0 reported on an H200, for
//! matrices of up to 8192 × 8192 in four types, with three exceptions: `syevj` only below 4096,
//! `getrf` only up to 1024, and `Xgeev` to 3 %. `gesvd` and `gesvda` have no formula and report 0.

const ALIGNMENT: u64 = 32;

fn aligned(elements: u64) -> u64 {
    elements.next_multiple_of(ALIGNMENT)
}

/// The workspace that `name`, a function `cusolverDn…_bufferSize`, reports: in elements of the
/// matrix, or in bytes if the function takes the type as an argument. `argument` returns an integer
/// argument by its position.
pub(crate) fn workspace(name: &str, argument: impl Fn(usize) -> u64) -> u64 {
    let Some(routine) = name
        .strip_prefix("cusolverDn")
        .and_then(|name| name.strip_suffix("_bufferSize"))
    else {
        return 0;
    };
    // These limits are larger than any matrices in memory, and keep the products below 2^64.
    let number = |place: usize, limit: u64| (argument(place) & u64::from(u32::MAX)).min(limit);
    let (dimension, batch) = (
        |place| number(place, 1 << 18),
        |place| number(place, 1 << 24),
    );
    let Some((letter, routine)) = routine.split_at_checked(1) else {
        return 0;
    };
    let element = |place: usize| {
        let (bytes, complex) = match dimension(place) {
            0 => (4, false),
            1 => (8, false),
            4 => (8, true),
            _ => (16, true),
        };
        Element { bytes, complex }
    };
    let bytes = match letter {
        "S" => 4,
        "D" | "C" => 8,
        "Z" => 16,
        _ => {
            return match routine {
                "potrf" => cholesky(dimension(3)),
                "geqrf" => element(4).bytes * qr(dimension(3)) + 128,
                "syevd" => element(5).bytes * eigenvalues(dimension(4), 1) + 128,
                "syevBatched" => element(5)
                    .bytes
                    .saturating_mul(eigenvalues(dimension(4), batch(13)))
                    .saturating_add(128),
                "geev" => general_eigenvalues(dimension(4), element(5)),
                _ => 0,
            };
        }
    };
    match routine {
        "potrf" => cholesky(dimension(2)) / bytes,
        "getrf" => lu(dimension(1).min(dimension(2))) / bytes,
        "sytrf" => symmetric_indefinite(letter, dimension(1)),
        "geqrf" => qr(dimension(2)),
        "orgqr" | "ungqr" => generate_q(dimension(1), dimension(2), dimension(3)),
        "ormqr" | "unmqr" => {
            multiply_by_q(dimension(1) == 0, dimension(3), dimension(4), dimension(5))
        }
        "syevd" | "heevd" => eigenvalues(dimension(3), 1),
        "syevj" | "heevj" => {
            let (n, blocks) = (dimension(3), dimension(3).div_ceil(32));
            n * n + n + 1024 * (blocks + 1) + 4 * blocks * blocks + blocks
        }
        "syevjBatched" | "heevjBatched" => {
            let (n, blocks) = (dimension(3), dimension(3).div_ceil(32));
            batch(9) * ((n + 1) * (n + 1) + 1024 * blocks) + 1024 + 4 * blocks * blocks
        }
        "gesvdj" => singular_values(dimension(2) != 0, dimension(3), dimension(4)),
        "gesvdjBatched" => 992,
        _ => 0,
    }
}

#[derive(Clone, Copy)]
struct Element {
    bytes: u64,
    complex: bool,
}

/// In bytes.
fn cholesky(n: u64) -> u64 {
    128 + aligned(4 * n.div_ceil(32).pow(2))
}

/// In bytes, for the smaller side of the matrix.
fn lu(side: u64) -> u64 {
    256 + (8 * side.max(32).next_power_of_two()).min(4096) + 256 * side.div_ceil(32)
}

fn symmetric_indefinite(letter: &str, n: u64) -> u64 {
    let least = match letter {
        "S" => 24_608,
        "Z" => 11_016,
        _ => 13_328,
    };
    if n < 4096 {
        least.max(64 * (n + 1))
    } else {
        128 * n + 64
    }
}

fn qr(columns: u64) -> u64 {
    1024 * (columns.max(256) + 512)
}

fn generate_q(rows: u64, columns: u64, reflectors: u64) -> u64 {
    let panel = reflectors.min(128);
    16_640 + aligned(rows * panel) + aligned(2 * panel * columns).max(16_384)
}

/// `left`: Q × C, otherwise C × Q, for C with `m` rows and `n` columns.
fn multiply_by_q(left: bool, m: u64, n: u64, reflectors: u64) -> u64 {
    let (per_column, side) = if left { (512 * n, n) } else { (0, m) };
    let scalars = if m.max(n) > 32 { aligned(side) } else { 0 };
    65_792 + 256 * m + per_column + scalars + aligned((m.max(n) + reflectors) * reflectors)
}

/// For `batch` symmetric matrices.
fn eigenvalues(n: u64, batch: u64) -> u64 {
    let n_minus_1 = n.saturating_sub(1);
    let vectors = batch * (n * n + 2 * n + 3);
    let diagonals = if n > 32 { aligned(batch * n) } else { 0 };
    let small = aligned(batch * (2 * n).saturating_sub(1) * n_minus_1)
        + batch * (768 * n + 65_536)
        + diagonals;
    let large = aligned(batch * (3 * n).saturating_sub(1) * n_minus_1)
        + batch * (128 * n + 32_896)
        + aligned(batch * n);
    vectors + small.max(large) + 32
}

/// In bytes.
fn general_eigenvalues(n: u64, element: Element) -> u64 {
    let (small, panels, large) = if element.complex {
        (3 * n / 2 + 320, 13 * n / 4, 7 * n / 2)
    } else {
        (2 * n + 384, 4 * n, 4 * n)
    };
    let elements = if n < 96 {
        n * n + 32_768 + small
    } else {
        (3 * n * (n - 1).min(128) + 16_384 + panels).max(n * n + large)
    };
    (element.bytes * elements).next_multiple_of(512)
}

/// `thin`: of the larger factor, only as many columns as the smaller side has.
fn singular_values(thin: bool, m: u64, n: u64) -> u64 {
    let (rows, columns, transposed) = if m < n {
        (n, m, aligned(m * n))
    } else {
        (m, n, 0)
    };
    let blocks = columns.div_ceil(32);
    let square = aligned(2 * columns * columns)
        + 1024 * (2 * blocks + 1)
        + aligned(columns + 4 * blocks * blocks + blocks);
    if m == n {
        return square;
    }
    let factor = multiply_by_q(true, rows, if thin { columns } else { rows }, columns);
    (aligned(columns) + factor.max(qr(columns) + 32) + transposed)
        .max(square + aligned(columns * columns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_formulas_give_the_sizes_that_cusolver_reported() {
        let mut wrong = Vec::new();
        for row in include_str!("solver.tsv")
            .lines()
            .filter(|line| !line.starts_with('#'))
        {
            let [name, arguments, size] = row.split('\t').collect::<Vec<_>>()[..] else {
                panic!("{row}")
            };
            let values: Vec<(usize, u64)> = arguments
                .split_terminator(' ')
                .map(|pair| {
                    pair.split_once('=')
                        .and_then(|(place, value)| Some((place.parse().ok()?, value.parse().ok()?)))
                        .expect(row)
                })
                .collect();
            // The upper half of a 32-bit argument is undefined.
            let undefined = 0xdead_beef_u64 << 32;
            let found = workspace(name, |place| {
                undefined
                    | values
                        .iter()
                        .find(|value| value.0 == place)
                        .map_or(0, |value| value.1)
            });
            let tolerance = if name.contains("geev") { 1024 } else { 0 };
            if found.abs_diff(size.parse().expect(row)) > tolerance {
                wrong.push(format!("{row}, not {found}"));
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    #[test]
    fn the_largest_arguments_do_not_overflow() {
        for row in include_str!("unmodelled.tsv")
            .lines()
            .filter(|row| row.starts_with("cusolverDn"))
        {
            workspace(row.split('\t').next().unwrap_or_default(), |_| u64::MAX);
        }
    }
}
