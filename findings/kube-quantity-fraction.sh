#!/usr/bin/env bash
# kube_quantity 0.9.0 (https://crates.io/crates/kube_quantity) reads half a GiB as 0 bytes, and writes a sum with a thousandfold value.
#
# `ParsedQuantity::to_bytes_i64` drops the fraction before it multiplies by the unit (src/quantity.rs, line 330): 1.5Gi is 1073741824, and 0.5Gi
# is 0, without an error. `to_bytes_i128` and `to_bytes_i32` do the same; `to_bytes_f64` is right. Kubernetes accepts both quantities.
#
# Kubernetes writes a limit of 4.1Gi as 4402341478400m, in thousandths of a byte (https://github.com/kubernetes/kubernetes/issues/21654). Its sum with
# a quantity of a binary unit is counted in units of 1/1024, which have no suffix, so the text has none. The text is valid, and has 1024 times
# the value: a limit of 5.1 GiB becomes 5.1 TiB. In the other order, the text has its suffix. Both sums are more than 170 B too large, because
# the factor between decimal and binary units is rounded.
#
# Seen on 30 November 2026 with rustc 1.95.0 on x86-64 Linux: the lines in `expected` below.
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
k8s-openapi = { version = "=0.29.0", features = ["latest"] }
kube_quantity = "=0.9.0"
END_OF_FILE
cat >"$folder/src/main.rs" <<'END_OF_FILE'
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube_quantity::ParsedQuantity;

fn parsed(text: &str) -> ParsedQuantity {
    ParsedQuantity::try_from(text).unwrap()
}

fn main() {
    for text in ["512Mi", "0.5Gi", "1.5Gi", "2.5G"] {
        let quantity = parsed(text);
        println!("{text}: integer {}, float {}", quantity.to_bytes_i64().unwrap(), quantity.to_bytes_f64().unwrap());
    }
    for (left, right) in [("1Gi", "4402341478400m"), ("4402341478400m", "1Gi")] {
        let sum = parsed(left) + parsed(right);
        let float = sum.to_bytes_f64().unwrap();
        let written = Quantity::from(sum).0;
        let again = parsed(&written).to_bytes_f64().unwrap();
        println!("{left} + {right}: float {float:.0}, written {written}, read again {again:.0}");
    }
}
END_OF_FILE
expected='512Mi: integer 536870912, float 536870912
0.5Gi: integer 0, float 536870912
1.5Gi: integer 1073741824, float 1610612736
2.5G: integer 2000000000, float 2500000000
1Gi + 4402341478400m: float 5476083732, written 5607509741891.74784, read again 5607509741892
4402341478400m + 1Gi: float 5476083474, written 5476083474001.952768m, read again 5476083474'
seen=$(cargo run --quiet --manifest-path "$folder/Cargo.toml" --target-dir "$folder/target")
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
