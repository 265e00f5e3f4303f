#!/usr/bin/env bash
# @minhducsun2002/leb128 1.0.0 (https://www.npmjs.com/package/@minhducsun2002/leb128) writes -1 and -128 as the byte 0, and reads back -64 as 0, without an
# error.
#
# LEB128 has seven bits of an integer in each byte. The upper bit of the last seven is the sign, so one byte has the integers from -64 to 63 (section
# 7.6 of https://dwarfstd.org/doc/DWARF5.pdf, whose examples are 80 7f for -128 and 81 7f for -127). The library computes the number of bytes without
# the sign, and no byte for -1 (dist/index.js, line 109). So -65 to -128 have one byte, -8193 to -16384 have two, and other readers return numbers from 0
# on. Its reader takes the number of bits from the logarithm of the unsigned value, so it also returns 0 for -64 and -8192, whose bytes are right. leb128
# 1.0.9 of PyPI writes the expected bytes.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, the npm registry, python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" @minhducsun2002/leb128@1.0.0
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check leb128==1.0.9
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const { LEB128 } = require("@minhducsun2002/leb128");

for (const number of [-1, -2, -63, -64, -65, -100, -127, -128, -129, -8191, -8192, -8193, -100000]) {
  const bytes = LEB128.encode(number);
  console.log(number, Buffer.from(bytes).toString("hex"), LEB128.decode(bytes, 0, true));
}
JAVASCRIPT
cat >"$folder/program.py" <<'PYTHON'
import sys

import leb128

for line in sys.stdin:
    number, text, decoded = line.split()
    read = leb128.i.decode(bytes.fromhex(text))
    print(f"{number}: written as {text}, which is {read}, and read back as {decoded}; expected {leb128.i.encode(int(number)).hex()}")
PYTHON
seen=$(node "$folder/program.cjs" | "$folder/venv/bin/python" "$folder/program.py")
expected='-1: written as 00, which is 0, and read back as -1; expected 7f
-2: written as 7e, which is -2, and read back as -2; expected 7e
-63: written as 41, which is -63, and read back as -63; expected 41
-64: written as 40, which is -64, and read back as -0; expected 40
-65: written as 3f, which is 63, and read back as -1; expected bf7f
-100: written as 1c, which is 28, and read back as -4; expected 9c7f
-127: written as 01, which is 1, and read back as -0; expected 817f
-128: written as 00, which is 0, and read back as -1; expected 807f
-129: written as ff7e, which is -129, and read back as -129; expected ff7e
-8191: written as 8140, which is -8191, and read back as -8191; expected 8140
-8192: written as 8040, which is -8192, and read back as -0; expected 8040
-8193: written as ff3f, which is 8191, and read back as -1; expected ffbf7f
-100000: written as e0f279, which is -100000, and read back as -100000; expected e0f279'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
