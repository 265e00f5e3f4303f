#!/usr/bin/env bash
# @iljucha/cbor 1.0.10 (https://www.npmjs.com/package/@iljucha/cbor) writes each BigInt with the tag of a date, without an error. Another reader
# returns 1 May 2001 for 5.
#
# Tag 0 is a date and time as text; large integers have the tags 2 and 3, and 5 needs no tag (RFC 8949, sections 3.4.1 and 3.4.3). The library writes
# tag 0 and the decimal digits, and reads them as a BigInt again. cbor2 2.3.0 and cbor 10.0.12 read a date. Numbers are right.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" @iljucha/cbor@1.0.10 cbor2@2.3.0 cbor@10.0.12
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import * as module from "@iljucha/cbor";
import cbor from "cbor";
import { decode, encode } from "cbor2";

const library = module.CBOR ?? module.default ?? module;
const text = (value) => (value instanceof Date ? `date ${isNaN(value) ? "invalid" : value.toISOString()}` : `${typeof value} ${value}`);
for (const value of [5, 5n, 2026n, 2n ** 64n - 1n]) {
  const written = library.encode(value);
  const bytes = new Uint8Array(written);
  const results = [library.decode(written), decode(bytes), cbor.decodeFirstSync(bytes)].map(text);
  console.log(`${text(value)}: ${Buffer.from(bytes).toString("hex")}, cbor2 writes ${Buffer.from(encode(value)).toString("hex")}`);
  console.log(`  read by itself ${results[0]}, cbor2 ${results[1]}, cbor ${results[2]}`);
}
JAVASCRIPT
seen=$(TZ=UTC node "$folder/program.mjs")
expected='number 5: 05, cbor2 writes 05
  read by itself number 5, cbor2 number 5, cbor number 5
bigint 5: c06135, cbor2 writes 05
  read by itself bigint 5, cbor2 date 2001-05-01T00:00:00.000Z, cbor date 2001-05-01T00:00:00.000Z
bigint 2026: c06432303236, cbor2 writes 1907ea
  read by itself bigint 2026, cbor2 date 2026-01-01T00:00:00.000Z, cbor date 2026-01-01T00:00:00.000Z
bigint 18446744073709551615: c0743138343436373434303733373039353531363135, cbor2 writes 1bffffffffffffffff
  read by itself bigint 18446744073709551615, cbor2 date invalid, cbor date invalid'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
