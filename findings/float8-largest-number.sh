#!/usr/bin/env bash
# float8 0.7.0 (https://crates.io/crates/float8) has a largest number that is one step too small, and calls the largest one infinite.
#
# The format E4M3 of OCP and of NVIDIA's GPUs has 448 as its largest number and no infinity; E5M2 has 57344 and an infinity. The crate's `MAX` is
# 416 and 49152 (src/lib.rs, lines 1353 and 1395), and its `INFINITY` is 448 and 57344. Conversions return 448, but `is_infinite` is true for it,
# and false for the infinity of E5M2 from a file. So weights that are scaled to `MAX` do not use the largest number, and `clamp` changes it. CubeCL
# replaced the constants by its own (https://github.com/tracel-ai/cubecl/pull/1472).
#
# Seen on 1 December 2026 with rustc 1.95.0 on x86-64 Linux: the lines in `expected` below.
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
float8 = "=0.7.0"
END_OF_FILE
cat >"$folder/src/main.rs" <<'END_OF_FILE'
use float8::{F8E4M3, F8E5M2};

fn main() {
    println!("E4M3: MAX {}, INFINITY {}", F8E4M3::MAX, F8E4M3::INFINITY);
    for value in [416.0, 448.0, 1000.0] {
        let number = F8E4M3::from_f32(value);
        let clamped = number.clamp(F8E4M3::MIN, F8E4M3::MAX);
        println!("{value} is converted to {number}, infinite: {}, clamped: {clamped}", number.is_infinite());
    }
    println!("E5M2: MAX {}, INFINITY {}", F8E5M2::MAX, F8E5M2::INFINITY);
    for bits in [0x7a, 0x7b, 0x7c] {
        let number = F8E5M2::from_bits(bits);
        println!("bits {bits:#x} are {number}, infinite: {}", number.is_infinite());
    }
}
END_OF_FILE
expected='E4M3: MAX 416, INFINITY 448
416 is converted to 416, infinite: false, clamped: 416
448 is converted to 448, infinite: true, clamped: 416
1000 is converted to 448, infinite: true, clamped: 416
E5M2: MAX 49152, INFINITY 57344
bits 0x7a are 49152, infinite: false
bits 0x7b are 57344, infinite: true
bits 0x7c are inf, infinite: false'
seen=$(cargo run --quiet --manifest-path "$folder/Cargo.toml" --target-dir "$folder/target")
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
