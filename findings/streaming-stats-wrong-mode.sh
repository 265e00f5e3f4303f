#!/usr/bin/env bash
# streaming-stats 0.2.3 (https://crates.io/crates/streaming-stats) returns 3 as the mode of 1 1 1 2 2 2 3 3, and a mean of NaN after a merge of two
# parts without samples, without an error.
#
# `mode` returns the most frequent value, and None if several are equally frequent. At a tie, it forgets how often these occur (src/unsorted.rs,
# line 85), so a rarer value after them wins. `modes` has both values. `OnlineStats::merge` divides by the number of samples of both parts
# (src/online.rs, `merge`). If both are empty, the mean is 0 / 0, and stays NaN with any samples that follow. `MinMax` merges such parts correctly.
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
streaming-stats = "=0.2.3"
END_OF_FILE
cat >"$folder/src/main.rs" <<'END_OF_FILE'
use stats::{Commute, MinMax, OnlineStats};

fn main() {
    for values in [vec![1, 1, 2, 2, 3], vec![1, 1, 1, 2, 2, 2, 3, 3], vec![1, 1, 2, 2, 2, 3, 3]] {
        let (mode, modes) = (stats::mode(values.iter()), stats::modes(values.iter().copied()));
        println!("{values:?}: mode {mode:?}, most frequent {modes:?}");
    }
    let parts: [&[u32]; 3] = [&[], &[], &[1, 2, 3]];
    for order in [[0, 1, 2], [0, 2, 1], [2, 0, 1]] {
        let mut merged = OnlineStats::new();
        let mut range = MinMax::new();
        for part in order {
            merged.merge(OnlineStats::from_slice(parts[part]));
            range.merge(parts[part].iter().collect());
        }
        let parts: Vec<_> = order.iter().map(|&part| parts[part]).collect();
        println!("{parts:?}: samples {}, mean {}, deviation {:.3}, range {range:?}", merged.len(), merged.mean(), merged.stddev());
    }
}
END_OF_FILE
expected='[1, 1, 2, 2, 3]: mode None, most frequent [1, 2]
[1, 1, 1, 2, 2, 2, 3, 3]: mode Some(3), most frequent [1, 2]
[1, 1, 2, 2, 2, 3, 3]: mode Some(2), most frequent [2]
[[], [], [1, 2, 3]]: samples 3, mean NaN, deviation NaN, range [1, 3]
[[], [1, 2, 3], []]: samples 3, mean NaN, deviation NaN, range [1, 3]
[[1, 2, 3], [], []]: samples 3, mean 2, deviation 0.816, range [1, 3]'
seen=$(cargo run --quiet --manifest-path "$folder/Cargo.toml" --target-dir "$folder/target")
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
