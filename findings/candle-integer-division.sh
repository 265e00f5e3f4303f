#!/usr/bin/env bash
# In candle-core 0.11.1 (https://crates.io/crates/candle-core), an integer tensor divided by 2 is zero, and the mean of integers is zero.
#
# `tensor / 2.` multiplies by 0.5, and `mean` multiplies the sum by 1 / n. Both call `affine`, which converts its factor to the type of the tensor
# (src/cpu_backend/mod.rs, line 386). So each factor below 1 is 0, and 1.5 is 1. The documentation of `affine` says that rounding might be
# performed; that of `mean` does not, and the operators have none. A division by a tensor is right.
#
# Seen on 1 December 2026 with rustc 1.95.0 on x86-64 Linux, on the CPU: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs cargo and crates.io.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/src"
cat >"$folder/Cargo.toml" <<'END_OF_FILE'
[package]
name = "finding"
version = "0.1.0"
edition = "2021"

[dependencies]
candle-core = "=0.11.1"

[profile.dev]
debug = false
END_OF_FILE
cat >"$folder/src/main.rs" <<'END_OF_FILE'
use candle_core::{DType, Device, Result, Tensor};

fn main() -> Result<()> {
    let sizes = Tensor::new(&[4f64, 10., 16.], &Device::Cpu)?;
    let two = Tensor::new(&[2f64], &Device::Cpu)?;
    for dtype in [DType::F32, DType::I64, DType::U32] {
        let (sizes, two) = (sizes.to_dtype(dtype)?, two.to_dtype(dtype)?);
        let results = [
            ("/ 2", (&sizes / 2.)?),
            ("* 1.5", (&sizes * 1.5)?),
            ("mean", sizes.mean_keepdim(0)?),
            ("/ tensor of 2", sizes.broadcast_div(&two)?),
        ];
        for (name, result) in results {
            println!("[4, 10, 16] of {dtype:?} {name}: {:?}", result.to_dtype(DType::F64)?.to_vec1::<f64>()?);
        }
    }
    Ok(())
}
END_OF_FILE
expected='[4, 10, 16] of F32 / 2: [2.0, 5.0, 8.0]
[4, 10, 16] of F32 * 1.5: [6.0, 15.0, 24.0]
[4, 10, 16] of F32 mean: [10.0]
[4, 10, 16] of F32 / tensor of 2: [2.0, 5.0, 8.0]
[4, 10, 16] of I64 / 2: [0.0, 0.0, 0.0]
[4, 10, 16] of I64 * 1.5: [4.0, 10.0, 16.0]
[4, 10, 16] of I64 mean: [0.0]
[4, 10, 16] of I64 / tensor of 2: [2.0, 5.0, 8.0]
[4, 10, 16] of U32 / 2: [0.0, 0.0, 0.0]
[4, 10, 16] of U32 * 1.5: [4.0, 10.0, 16.0]
[4, 10, 16] of U32 mean: [0.0]
[4, 10, 16] of U32 / tensor of 2: [2.0, 5.0, 8.0]'
seen=$(cargo run --quiet --manifest-path "$folder/Cargo.toml" --target-dir "$folder/target")
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
