#!/usr/bin/env bash
# bcd 1.0.0 (https://www.npmjs.com/package/bcd) writes 2^32 as no digits at all, and 12345678901 as 3755744309, without an error.
#
# A binary coded decimal has two digits in each byte, and no limit of its own. The encoder keeps the lowest 32 bits of a number (index.js, line 19),
# although its documentation promises the fewest bytes that fit the number. Numbers with 11 digits, such as telephone numbers, and times in milliseconds
# are larger. The decoder of the package reads such digits right.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" bcd@1.0.0
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const bcd = require("bcd");

for (const number of [99999999, 2 ** 32 - 1, 2 ** 32, 9999999999, 12345678901, 1764590400000]) {
  const digits = String(number);
  const bytes = Buffer.from(digits.length % 2 ? `0${digits}` : digits, "hex");
  console.log(`${number}: written as "${bcd.encode(number).toString("hex")}", in 8 bytes as ${bcd.encode(number, 8).toString("hex")}, read as ${bcd.decode(bytes)}`);
}
JAVASCRIPT
seen=$(node --no-deprecation "$folder/program.cjs")
expected='99999999: written as "99999999", in 8 bytes as 0000000099999999, read as 99999999
4294967295: written as "4294967295", in 8 bytes as 0000004294967295, read as 4294967295
4294967296: written as "", in 8 bytes as 0000000000000000, read as 4294967296
9999999999: written as "1410065407", in 8 bytes as 0000001410065407, read as 9999999999
12345678901: written as "3755744309", in 8 bytes as 0000003755744309, read as 12345678901
1764590400000: written as "3653808640", in 8 bytes as 0000003653808640, read as 1764590400000'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
