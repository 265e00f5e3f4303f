#!/usr/bin/env bash
# float80 1.1.0 (https://www.npmjs.com/package/float80) reads 2^-70 as 0, and 2^64 - 1 as 18446744073709551614.985, without an error.
#
# A float of 80 bits has 64 bits of significand, and magnitudes down to 3.6e-4951. The package returns a BigNumber, whose range is larger. It computes
# the powers with the default of bignumber.js, 20 digits after the point (src/float.js, line 22). So a number below 5e-21 has none, and the significand
# loses its last bits. `toString` rounds to six digits after the point, so it prints 2^-22 as 0.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" float80@1.1.0
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const { Float80 } = require("float80");

// A float is sign and exponent (16 bits), and the significand with its first bit (64 bits).
const floats = [
  ["1.5", 16383, 3n << 62n],
  ["2^-22", 16383 - 22, 1n << 63n],
  ["2^-60", 16383 - 60, 1n << 63n],
  ["2^-70", 16383 - 70, 1n << 63n],
  ["2^-100", 16383 - 100, 1n << 63n],
  ["2^63", 16383 + 63, 1n << 63n],
  ["2^64 - 1", 16383 + 63, (1n << 64n) - 1n],
];
for (const [name, exponent, significand] of floats) {
  const bytes = Buffer.alloc(10);
  bytes.writeUInt16BE(exponent);
  bytes.writeBigUInt64BE(significand, 2);
  const float = Float80.fromBytes([...bytes]);
  console.log(`${name}: asNumber ${float.asNumber().toString()}, toString ${float.toString()}`);
}
console.log(`expected: 2^-60 ${2 ** -60}, 2^-70 ${2 ** -70}, 2^64 - 1 ${2n ** 64n - 1n}`);
JAVASCRIPT
seen=$(node "$folder/program.cjs")
expected='1.5: asNumber 1.5, toString 1.5
2^-22: asNumber 2.3841857910156e-7, toString 0
2^-60: asNumber 8.7e-19, toString 0
2^-70: asNumber 0, toString 0
2^-100: asNumber 0, toString 0
2^63: asNumber 9223372036854775808, toString 9223372036854775808
2^64 - 1: asNumber 18446744073709551614.98542907594597466112, toString 18446744073709551614.985429
expected: 2^-60 8.673617379884035e-19, 2^-70 8.470329472543003e-22, 2^64 - 1 18446744073709551615'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
