#!/usr/bin/env bash
# ieee754-buffer 2.0.0 (https://www.npmjs.com/package/ieee754-buffer) writes 1.99999999999 as 2.002 in half precision, and 65507 as infinity, without an
# error.
#
# A float is the nearest number of its format. If the fraction is rounded up to the next power of two, the library adds 1 to the exponent and keeps a
# fraction of one step instead of 0 (`pack` in dist/ieee754-buffer.js). So the result is one step too large: 2.0000002 with 32 bits, and 2.016 with the
# 16 bits of bfloat16. IEEE 754 rounds to infinity from 65520 on in half precision, and the library from 65506 on. numpy 2.4.6 and ml_dtypes 0.6.0 compute
# the expected numbers.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, the npm registry, python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" ieee754-buffer@2.0.0
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 ml_dtypes==0.6.0
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const { IEEE754Buffer } = require("ieee754-buffer");

for (const [name, exponent, fraction, values] of [
  ["half precision", 5, 10, [1.9, 1.99999999999, 0.24999, 4095.9, 65504, 65505, 65507, 65519, 65520]],
  ["bfloat16", 8, 7, [1.9, 1.99999999999, 0.24999, 65504, 70000]],
  ["32 bits", 8, 23, [1.9, 1.99999999999, 0.2499999999, 16777215.9, 16777217]],
]) {
  const format = new IEEE754Buffer(exponent, fraction);
  for (const value of values) {
    const bytes = [];
    format.pack(bytes, value, 0);
    console.log(`${name},${value},${Buffer.from(bytes).toString("hex")},${format.unpack(bytes, 0)}`);
  }
}
JAVASCRIPT
cat >"$folder/program.py" <<'PYTHON'
import sys

import ml_dtypes
import numpy

types = {"half precision": (numpy.float16, "<u2"), "bfloat16": (ml_dtypes.bfloat16, "<u2"), "32 bits": (numpy.float32, "<u4")}
for line in sys.stdin:
    name, value, text, read = line.rstrip("\n").split(",")
    type, bits = types[name]
    with numpy.errstate(over="ignore"):
        expected = numpy.array([float(value)]).astype(type)
    seen = numpy.frombuffer(bytes.fromhex(text), bits).view(type)
    print(f"{name}: {value} is written as {float(seen[0])!r}, expected {float(expected[0])!r}; read back as {read}")
PYTHON
seen=$(node "$folder/program.cjs" | "$folder/venv/bin/python" "$folder/program.py")
expected='half precision: 1.9 is written as 1.900390625, expected 1.900390625; read back as 1.900390625
half precision: 1.99999999999 is written as 2.001953125, expected 2.0; read back as 2.001953125
half precision: 0.24999 is written as 0.250244140625, expected 0.25; read back as 0.250244140625
half precision: 4095.9 is written as 4100.0, expected 4096.0; read back as 4100
half precision: 65504 is written as 65504.0, expected 65504.0; read back as 65504
half precision: 65505 is written as 65504.0, expected 65504.0; read back as 65504
half precision: 65507 is written as inf, expected 65504.0; read back as Infinity
half precision: 65519 is written as inf, expected 65504.0; read back as Infinity
half precision: 65520 is written as inf, expected inf; read back as Infinity
bfloat16: 1.9 is written as 1.8984375, expected 1.8984375; read back as 1.8984375
bfloat16: 1.99999999999 is written as 2.015625, expected 2.0; read back as 2.015625
bfloat16: 0.24999 is written as 0.251953125, expected 0.25; read back as 0.251953125
bfloat16: 65504 is written as 66048.0, expected 65536.0; read back as 66048
bfloat16: 70000 is written as 70144.0, expected 70144.0; read back as 70144
32 bits: 1.9 is written as 1.899999976158142, expected 1.899999976158142; read back as 1.899999976158142
32 bits: 1.99999999999 is written as 2.000000238418579, expected 2.0; read back as 2.000000238418579
32 bits: 0.2499999999 is written as 0.2500000298023224, expected 0.25; read back as 0.2500000298023224
32 bits: 16777215.9 is written as 16777218.0, expected 16777216.0; read back as 16777218
32 bits: 16777217 is written as 16777216.0, expected 16777216.0; read back as 16777216'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
