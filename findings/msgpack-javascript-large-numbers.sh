#!/usr/bin/env bash
# notepack.io 3.0.1 (https://www.npmjs.com/package/notepack.io) writes 1e300 as 0, and @ygoe/msgpack 1.0.3
# (https://www.npmjs.com/package/@ygoe/msgpack) writes it as 2^64 - 1, without an error.
#
# Each finite float from 2^52 on is an integer. Both libraries write integers in at most 64 bits, and have no branch for larger ones
# (lib/encode.js, line 132; msgpack.js, line 105), for which MessagePack has the type float 64. @ygoe/msgpack also writes 2^63 as int 64, whose
# largest value is 2^63 - 1, and -2^63 with the wrong sign. @msgpack/msgpack writes all of these numbers correctly.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" notepack.io@3.0.1 @ygoe/msgpack@1.0.3 @msgpack/msgpack@3.1.3
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import { decode, encode } from "@msgpack/msgpack";
import notepack from "notepack.io";
import ygoe from "@ygoe/msgpack";

for (const value of [1.5, 2 ** 40, 2 ** 63, -(2 ** 63), 2 ** 64, 1e21, -1e300]) {
  const results = [encode, notepack.encode, ygoe.serialize].map((write) => {
    const bytes = Uint8Array.from(write(value));
    return `${Buffer.from(bytes).toString("hex")} = ${decode(bytes, { useBigInt64: true })}`;
  });
  console.log(`${value}: ${results[0]}; notepack.io ${results[1]}; @ygoe/msgpack ${results[2]}`);
}
JAVASCRIPT
seen=$(node "$folder/program.mjs")
expected='1.5: cb3ff8000000000000 = 1.5; notepack.io cb3ff8000000000000 = 1.5; @ygoe/msgpack cb3ff8000000000000 = 1.5
1099511627776: cf0000010000000000 = 1099511627776; notepack.io cf0000010000000000 = 1099511627776; @ygoe/msgpack d30000010000000000 = 1099511627776
9223372036854776000: cb43e0000000000000 = 9223372036854776000; notepack.io cf8000000000000000 = 9223372036854775808; @ygoe/msgpack d38000000000000000 = -9223372036854775808
-9223372036854776000: cbc3e0000000000000 = -9223372036854776000; notepack.io d38000000000000000 = -9223372036854775808; @ygoe/msgpack d37fffffffffffffff = 9223372036854775807
18446744073709552000: cb43f0000000000000 = 18446744073709552000; notepack.io cf0000000000000000 = 0; @ygoe/msgpack d30000000000000000 = 0
1e+21: cb444b1ae4d6e2ef50 = 1e+21; notepack.io cf35c9adc5dea00000 = 3875820019684212736; @ygoe/msgpack cfffffffffffffffff = 18446744073709551615
-1e+300: cbfe37e43c8800759c = -1e+300; notepack.io d30000000000000000 = 0; @ygoe/msgpack d38000000000000000 = -9223372036854775808'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
