#!/usr/bin/env bash
# purepack 1.0.6 (https://www.npmjs.com/package/purepack) reads each positive number that MessagePack has as an int 64 as a negative one: 127 is
# -18446744073709552000, without an error.
#
# The type int 64 (0xd3) has all integers from -2^63 to 2^63 - 1, and the specification lets a writer choose the type
# (https://github.com/msgpack/msgpack/blob/master/spec.md#serialization-type-to-format-conversion). @ygoe/msgpack writes it for integers from 2^32
# on. purepack subtracts 2^64 from all of them (lib/unpack.js, line 134). Negative ones are right.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" purepack@1.0.6 @msgpack/msgpack@3.1.3
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import { decode } from "@msgpack/msgpack";
import purepack from "purepack";

for (const value of [127n, 2n ** 33n, 2n ** 53n - 1n, -1n, -(2n ** 33n)]) {
  const bytes = Buffer.alloc(9);
  bytes[0] = 0xd3;
  bytes.writeBigInt64BE(value, 1);
  console.log(`${value}: ${bytes.toString("hex")}, @msgpack/msgpack ${decode(bytes)}, purepack ${purepack.unpack(bytes)}`);
}
JAVASCRIPT
seen=$(node "$folder/program.mjs")
expected='127: d3000000000000007f, @msgpack/msgpack 127, purepack -18446744073709552000
8589934592: d30000000200000000, @msgpack/msgpack 8589934592, purepack -18446744065119617000
9007199254740991: d3001fffffffffffff, @msgpack/msgpack 9007199254740991, purepack -18437736874454810000
-1: d3ffffffffffffffff, @msgpack/msgpack -1, purepack -1
-8589934592: d3fffffffe00000000, @msgpack/msgpack -8589934592, purepack -8589934592'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
