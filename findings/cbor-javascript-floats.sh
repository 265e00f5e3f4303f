#!/usr/bin/env bash
# @harmoniclabs/cbor 2.0.1 (https://www.npmjs.com/package/@harmoniclabs/cbor) reads 100000 as 7.4e-39, and cbor-js 0.1.0
# (https://www.npmjs.com/package/cbor-js) reads the smallest negative half as a positive one, without an error.
#
# The bytes and values are examples of RFC 8949, Appendix A; two of the halves have the other sign. CBOR has floats in network byte order. The first
# library reads those of 32 and 64 bits in the order of the machine (readFloat32BE and readFloat64BE in @harmoniclabs/uint8array-utils). The second
# one computes halves whose exponent is zero from their fraction alone (cbor.js, `readFloat16`). cbor2 2.3.0 reads all of them correctly.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" @harmoniclabs/cbor@2.0.1 cbor-js@0.1.0 cbor2@2.3.0
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import harmonic from "@harmoniclabs/cbor";
import cborJs from "cbor-js";
import { decode } from "cbor2";

const examples = { f90001: 2 ** -24, f98001: -(2 ** -24), f983ff: -1023 * 2 ** -24, f9c400: -4, fa47c35000: 100000, fb3ff199999999999a: 1.1 };
for (const [hex, value] of Object.entries(examples)) {
  const bytes = Uint8Array.from(Buffer.from(hex, "hex"));
  const results = [decode(bytes), cborJs.decode(bytes.buffer), harmonic.Cbor.parse(bytes).simple];
  const [reference, second, first] = results.map((result) => result.toPrecision(6));
  if (Number(reference) !== Number(value.toPrecision(6))) throw new Error(hex);
  console.log(`${hex}: cbor2 ${reference}, cbor-js ${second}, @harmoniclabs/cbor ${first}`);
}
JAVASCRIPT
seen=$(node "$folder/program.mjs")
expected='f90001: cbor2 5.96046e-8, cbor-js 5.96046e-8, @harmoniclabs/cbor 5.96046e-8
f98001: cbor2 -5.96046e-8, cbor-js 5.96046e-8, @harmoniclabs/cbor -5.96046e-8
f983ff: cbor2 -0.0000609756, cbor-js 0.0000609756, @harmoniclabs/cbor -0.0000609756
f9c400: cbor2 -4.00000, cbor-js -4.00000, @harmoniclabs/cbor -4.00000
fa47c35000: cbor2 100000, cbor-js 100000, @harmoniclabs/cbor 7.41689e-39
fb3ff199999999999a: cbor2 1.10000, cbor-js 1.10000, @harmoniclabs/cbor -1.54235e-180'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
