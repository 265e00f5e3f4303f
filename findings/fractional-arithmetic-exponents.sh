#!/usr/bin/env bash
# fractional-arithmetic 1.2.3 (https://www.npmjs.com/package/fractional-arithmetic) reads the number 5e-7 as 5/10000, and 10^21 as 1/100000, without an
# error.
#
# `new Fraction(number)` counts the digits after the point in the decimal text of a number (fractional-arithmetic.js, line 76). JavaScript writes numbers
# below 10^-6 and from 10^21 on with an exponent, and such a text often has no point. So 500 nanoseconds in seconds are 500 microseconds.
# `isInteger` also takes 10^21 for no integer. Numbers between are right.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" fractional-arithmetic@1.2.3
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const { Fraction, isInteger } = require("fractional-arithmetic");

for (const number of [0.5, 123.456, 1e-6, 5e-7, 1.5e-7, -2e-8, 2 ** 62, 1e20, 1e21, 1.5e300]) {
  const fraction = new Fraction(number);
  console.log(`${number}: ${fraction}, as a number ${fraction.toNumber()}`);
}
console.log(`1/3 + 5e-7: ${new Fraction(1, 3).plus(new Fraction(5e-7)).toNumber()}, expected ${1 / 3 + 5e-7}`);
console.log(`isInteger: 1e20 ${isInteger(1e20)}, 1e21 ${isInteger(1e21)}`);
JAVASCRIPT
seen=$(node "$folder/program.cjs")
expected='0.5: (5/10), as a number 0.5
123.456: (123456/1000), as a number 123.456
0.000001: (1/1000000), as a number 0.000001
5e-7: (5/10000), as a number 0.0005
1.5e-7: (15/10000), as a number 0.0015
-2e-8: (-2/100000), as a number -0.00002
4611686018427388000: (4611686018427388000/1), as a number 4611686018427388000
100000000000000000000: (100000000000000000000/1), as a number 100000000000000000000
1e+21: (1/100000), as a number 0.00001
1.5e+300: (15/1000000), as a number 0.000015
1/3 + 5e-7: 0.3338333333333333, expected 0.33333383333333333
isInteger: 1e20 true, 1e21 false'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
