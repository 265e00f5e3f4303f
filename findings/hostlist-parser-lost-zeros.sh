#!/usr/bin/env bash
# hostlist-parser 0.1.6 (https://crates.io/crates/hostlist-parser) returns other hosts, without an error, if a range with leading zeros passes a
# power of ten.
#
# Slurm writes 20 nodes as gpu[090-109]. If the two ends have different numbers of leading zeros, the crate fills names to one digit more than the
# first end has zeros (src/structures.rs, line 56). That is its width only if it is a single digit after the zeros, as in gpu[001-100]. So gpu090
# becomes gpu90. The range gpu[090-099] is right.
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
hostlist-parser = "=0.1.6"
END_OF_FILE
cat >"$folder/src/main.rs" <<'END_OF_FILE'
fn main() {
    for (first, last, width) in [(90, 99, 3), (90, 109, 3), (1, 100, 3), (998, 1001, 4)] {
        let expected: Vec<String> = (first..=last).map(|number| format!("gpu{number:0width$}")).collect();
        let list = format!("gpu[{first:0width$}-{last:0width$}]");
        let names = hostlist_parser::parse(&list).unwrap();
        let right = names.iter().zip(&expected).filter(|(name, expected)| name == expected).count();
        println!("{list}: first {}, expected {}; {right} of {} names right", names[0], expected[0], names.len());
    }
}
END_OF_FILE
expected='gpu[090-099]: first gpu090, expected gpu090; 10 of 10 names right
gpu[090-109]: first gpu90, expected gpu090; 10 of 20 names right
gpu[001-100]: first gpu001, expected gpu001; 100 of 100 names right
gpu[0998-1001]: first gpu998, expected gpu0998; 2 of 4 names right'
seen=$(cargo run --quiet --manifest-path "$folder/Cargo.toml" --target-dir "$folder/target")
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
