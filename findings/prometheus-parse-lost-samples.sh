#!/usr/bin/env bash
# prometheus-parse 0.2.5 (https://crates.io/crates/prometheus-parse) leaves out samples of valid metrics, and cuts or drops labels, without an
# error.
#
# The text format of Prometheus has a colon in names of recorded rules, and any character in the value of a label. The crate matches a name without
# a colon and labels up to the first brace (src/lib.rs, line 13), and skips each other line. It splits labels at each comma and each equals sign
# (lines 127 and 128), so a value ends at a comma, a label whose value has an equals sign is left out, and two series can become equal. It leaves
# escaped quotes as they are. An open pull request of June 2024 repairs the equals sign (https://github.com/ccakes/prometheus-parse-rs/pull/10).
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
prometheus-parse = "=0.2.5"
END_OF_FILE
cat >"$folder/src/main.rs" <<'END_OF_FILE'
use prometheus_parse::Scrape;

const METRICS: &str = r#"# TYPE gpu_used_bytes gauge
gpu_used_bytes{job="train"} 1
gpu_used_bytes{job="train, step 2"} 2
gpu_used_bytes{job="train, step 3"} 3
gpu_used_bytes{job="train lr=0.1"} 4
gpu_used_bytes{job="train \"a\""} 5
gpu_used_bytes{job="train {a}"} 6
# TYPE gpu:used_bytes:sum gauge
gpu:used_bytes:sum 7
"#;

fn main() {
    let scrape = Scrape::parse(METRICS.lines().map(|line| Ok(line.to_owned()))).unwrap();
    for sample in &scrape.samples {
        println!("{} of {:?}: {:?}", sample.metric, sample.labels.get("job"), sample.value);
    }
    println!("{} of 7 samples", scrape.samples.len());
}
END_OF_FILE
expected='gpu_used_bytes of Some("train"): Gauge(1.0)
gpu_used_bytes of Some("train"): Gauge(2.0)
gpu_used_bytes of Some("train"): Gauge(3.0)
gpu_used_bytes of None: Gauge(4.0)
gpu_used_bytes of Some("train \\\"a\\"): Gauge(5.0)
5 of 7 samples'
seen=$(cargo run --quiet --manifest-path "$folder/Cargo.toml" --target-dir "$folder/target")
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
