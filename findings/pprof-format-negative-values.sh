#!/usr/bin/env bash
# pprof-format 2.3.2 (https://www.npmjs.com/package/pprof-format) reads each negative value of a profile as a positive one near 2^64, without an error.
#
# The values of pprof are signed, and a difference of two profiles has negative values: a function with 5 B less has -5 B. The library
# writes them correctly. `Profile.decode` returns varints as unsigned integers, so -5 B become 16 EiB. No bit is lost:
# `BigInt.asIntN(64, value)` restores them.
#
# Seen on 30 November 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" pprof-format@2.3.2
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import { Function, Line, Location, Profile, Sample, StringTable, ValueType } from "pprof-format";

const strings = new StringTable();
const values = [3n, -5n, -(2n ** 33n), 2n ** 63n - 1n];
const profile = new Profile({
  stringTable: strings,
  sampleType: [new ValueType({ type: strings.dedup("space"), unit: strings.dedup("bytes") })],
  sample: values.map((value) => new Sample({ locationId: [1], value: [value] })),
  location: [new Location({ id: 1, line: [new Line({ functionId: 1, line: 1 })] })],
  function: [new Function({ id: 1, name: strings.dedup("main") })],
});
const { sample } = Profile.decode(profile.encode());
values.forEach((written, index) => {
  const read = BigInt(sample[index].value[0]);
  console.log(`written ${written}, read ${read}, as signed ${BigInt.asIntN(64, read)}`);
});
JAVASCRIPT
seen=$(node "$folder/program.mjs")
expected='written 3, read 3, as signed 3
written -5, read 18446744073709551611, as signed -5
written -8589934592, read 18446744065119617024, as signed -8589934592
written 9223372036854775807, read 9223372036854775807, as signed 9223372036854775807'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
