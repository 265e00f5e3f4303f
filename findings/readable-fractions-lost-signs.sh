#!/usr/bin/env bash
# readable-fractions 0.1.1 (https://www.npmjs.com/package/readable-fractions) reads -1/2 as 0.5, -3 as 0 and -2 3/4 as 0.67, without an error.
#
# `fractionToDecimal` documents the result as precise. It splits the text at each character that is no digit (src/fractionToDecimal.js), so a sign is a
# separator, and moves the following numbers to other places. A number with a point is wrong for the same reason. `toReadableFraction` of the package writes
# negative numbers with a sign, so a number that is written and read changes. The fractions module of Python computes the expected numbers.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, the npm registry, and python3.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" readable-fractions@0.1.1
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const { fractionToDecimal, toReadableFraction } = require("readable-fractions");

for (const text of ["1/2", "2 3/4", "3", "-1/2", "-3", "-2 3/4", "1.5"]) console.log(`read ${text}: ${fractionToDecimal(text)}`);
for (const number of [0.5, 1.5, -0.5, -1.5]) {
  const text = toReadableFraction(number, true);
  console.log(`write ${number}: ${text}, read ${fractionToDecimal(text)}`);
}
JAVASCRIPT
cat >"$folder/program.py" <<'PYTHON'
from fractions import Fraction

for text in "1/2", "2 3/4", "3", "-1/2", "-3", "-2 3/4", "1.5":
    whole, _, part = text.rpartition(" ")
    value = Fraction(part) if not whole else int(whole) + (-1 if whole.startswith("-") else 1) * Fraction(part)
    print(f"expected {text}: {float(value):g}")
PYTHON
seen=$(node "$folder/program.cjs"; python3 "$folder/program.py")
expected='read 1/2: 0.5
read 2 3/4: 2.75
read 3: 3
read -1/2: 0.5
read -3: 0
read -2 3/4: 0.6666666666666666
read 1.5: 0.2
write 0.5: 1/2, read 0.5
write 1.5: 1 1/2, read 1.5
write -0.5: -1/2, read 0.5
write -1.5: -3/2, read 1.5
expected 1/2: 0.5
expected 2 3/4: 2.75
expected 3: 3
expected -1/2: -0.5
expected -3: -3
expected -2 3/4: -2.75
expected 1.5: 1.5'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
