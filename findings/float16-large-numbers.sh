#!/usr/bin/env bash
# float16 0.0.1 (https://www.npmjs.com/package/float16) writes 70000 as NaN, 131072 as -0 and 10^6 as -0.00023, without an error.
#
# The largest number of a half-precision float is 65504. IEEE 754 rounds each number from 65520 on to infinity. The library writes the exponent without a
# check (src/index.js, line 45): the exponent 31 with a fraction is NaN, and a larger one changes the sign. From 2^33 on, the result has more than 16
# bits. Numbers in the range and infinities are right.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20 and numpy 2.4.6: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, the npm registry, python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" float16@0.0.1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import subprocess
import sys

import numpy

numbers = ["0.1", "65504", "65519", "65535", "66000", "70000", "-70000", "131072", "1000000", "1e9", "1e12"]
script = """
const { byteToFloat16, float16ToByte } = require("float16");
for (const text of process.argv.slice(1)) {
  const bits = float16ToByte(Number(text));
  console.log(`${bits.toString(16)} ${byteToFloat16(bits)}`);
}
"""
lines = subprocess.run(["node", "-e", script, "--", *numbers], cwd=sys.argv[1], check=True, capture_output=True, text=True).stdout.splitlines()
with numpy.errstate(over="ignore"):
    for number, line in zip(numbers, lines, strict=True):
        half = numpy.float16(number)
        print(f"{number}: float16 {line}, numpy {half.view(numpy.uint16):x} {half}")
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py" "$folder")
expected='0.1: float16 2e66 0.0999755859375, numpy 2e66 0.0999755859375
65504: float16 7bff 65504, numpy 7bff 65504.0
65519: float16 7bff 65504, numpy 7bff 65504.0
65535: float16 7c00 Infinity, numpy 7c00 inf
66000: float16 7c07 NaN, numpy 7c00 inf
70000: float16 7c46 NaN, numpy 7c00 inf
-70000: float16 fc46 NaN, numpy fc00 -inf
131072: float16 8000 0, numpy 7c00 inf
1000000: float16 8ba1 -0.00023281574249267578, numpy 7c00 inf
1e9: float16 b373 -0.2327880859375, numpy 7c00 inf
1e12: float16 3a35294403800 0.5, numpy 7c00 inf'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
