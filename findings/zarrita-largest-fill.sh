#!/usr/bin/env bash
# zarrita 0.7.5 (https://www.npmjs.com/package/zarrita) returns 0 for missing chunks whose fill value is 2^64 - 1, and -2^63 for 2^63 - 1, without
# an error.
#
# A Zarr array of integers of 64 bits has its fill value as a number in JSON. zarrita reads it as a float, which rounds it up to 2^64, and converts
# that to a BigInt (dist/src/util.js, line 286). An array of 64 bits wraps it. So the largest values, which often mark missing data, become the
# smallest ones. An issue of the specification describes that JavaScript loses digits, but not this result
# (https://github.com/zarr-developers/zarr-specs/issues/334).
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" zarrita@0.7.5
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import * as zarr from "zarrita";

const fills = [
  ["uint64", 2n ** 64n - 1n],
  ["int64", 2n ** 63n - 1n],
  ["int64", 2n ** 53n + 1n],
  ["int64", -(2n ** 63n)],
  ["uint32", 2n ** 32n - 1n],
];
for (const [type, fill] of fills) {
  // An array without chunks: each element is the fill value.
  const metadata = {
    zarr_format: 3,
    node_type: "array",
    shape: [2],
    data_type: type,
    chunk_grid: { name: "regular", configuration: { chunk_shape: [2] } },
    chunk_key_encoding: { name: "default" },
    fill_value: "FILL",
    codecs: [{ name: "bytes", configuration: { endian: "little" } }],
    attributes: {},
  };
  const text = JSON.stringify(metadata).replace('"FILL"', fill);
  const array = await zarr.open.v3(new Map([["/zarr.json", new TextEncoder().encode(text)]]), { kind: "array" });
  console.log(`${type}: fill value ${fill}, returned ${(await zarr.get(array)).data[0]}`);
}
JAVASCRIPT
seen=$(node "$folder/program.mjs")
expected='uint64: fill value 18446744073709551615, returned 0
int64: fill value 9223372036854775807, returned -9223372036854775808
int64: fill value 9007199254740993, returned 9007199254740992
int64: fill value -9223372036854775808, returned -9223372036854775808
uint32: fill value 4294967295, returned 4294967295'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
