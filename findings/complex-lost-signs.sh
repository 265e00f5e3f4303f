#!/usr/bin/env bash
# complex 3.0.1 (https://www.npmjs.com/package/complex) reads -3+4i as 3+4i, and 1.5+2.5i as 0, without an error.
#
# `Complex.from` documents texts such as 2+5i. Its pattern has a real part without a sign, and digits without a point (lib/Complex.js, line 222), and it can
# match in the middle of a text. So the sign of the real part is lost, the real part of 1.5-2i is 5, and a number whose imaginary part has a point or no
# sign is 0. `toString` writes such texts, so a number that is written and read changes. Python reads them.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, the npm registry, and python3.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" complex@3.0.1
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const Complex = require("complex");

for (const [real, imaginary] of [[3, 4], [-3, 4], [-2, -3], [1.5, -2], [1.5, 2.5], [10, -2.5], [-1.5, 0], [0, 2], [1e-7, 2]]) {
  const text = new Complex(real, imaginary).toString();
  const read = Complex.from(text);
  console.log(text, read.real, read.im);
}
JAVASCRIPT
cat >"$folder/program.py" <<'PYTHON'
import sys

for line in sys.stdin:
    text, real, imaginary = line.split()
    expected = complex(text.replace("i", "j"))
    print(f"{text}: complex {real} and {imaginary}, expected {expected.real:g} and {expected.imag:g}")
PYTHON
seen=$(node "$folder/program.cjs" | python3 "$folder/program.py")
expected='3+4i: complex 3 and 4, expected 3 and 4
-3+4i: complex 3 and 4, expected -3 and 4
-2-3i: complex 2 and -3, expected -2 and -3
1.5-2i: complex 5 and -2, expected 1.5 and -2
1.5+2.5i: complex 0 and 0, expected 1.5 and 2.5
10-2.5i: complex 0 and 0, expected 10 and -2.5
-1.5: complex -1.5 and 0, expected -1.5 and 0
2i: complex 0 and 0, expected 0 and 2
1e-7+2i: complex 7 and 2, expected 1e-07 and 2'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
