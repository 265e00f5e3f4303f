#!/usr/bin/env bash
# nvml-wrapper 0.13.0 (https://crates.io/crates/nvml-wrapper) cuts values of NVML to 32 bits if their type is `unsigned long`.
#
# NVML says of each value of a field or a sample which C type it has. On 64-bit Linux `unsigned long` has 64 bits, but
# `SampleValue::from_tag_and_union` (src/enums/device.rs, line 74) returns such a value as `SampleValue::U32`, without an
# error. Readers expect the whole value, because `unsigned long long` keeps it. A time in nanoseconds is wrong after 4.3 s.
#
# Seen on 28 November 2026 with rustc 1.95.0 on x86-64 Linux, without a GPU:
#
#     unsigned long 5000000000: U32(705032704)
#     unsigned long long 5000000000: U64(5000000000)
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs cargo and crates.io.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/src"
cat >"$folder/Cargo.toml" <<'END'
[package]
name = "finding"
version = "0.1.0"
edition = "2021"

[dependencies]
nvml-wrapper = "=0.13.0"
nvml-wrapper-sys = "=0.10.0"
END
cat >"$folder/src/main.rs" <<'END'
use nvml_wrapper::enum_wrappers::device::SampleValueType;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper_sys::bindings::nvmlValue_t;

fn main() {
    let long = nvmlValue_t { ulVal: 5_000_000_000 };
    let read = SampleValue::from_tag_and_union(&SampleValueType::UnsignedLong, long);
    println!("unsigned long 5000000000: {read:?}");
    let long_long = nvmlValue_t { ullVal: 5_000_000_000 };
    let read = SampleValue::from_tag_and_union(&SampleValueType::UnsignedLongLong, long_long);
    println!("unsigned long long 5000000000: {read:?}");
}
END
expected='unsigned long 5000000000: U32(705032704)
unsigned long long 5000000000: U64(5000000000)'
seen=$(cargo run --quiet --manifest-path "$folder/Cargo.toml" --target-dir "$folder/target")
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
