#!/usr/bin/env bash
# pprof-to-md 0.2.0 (https://www.npmjs.com/package/pprof-to-md) makes an inlined function the caller of the function that calls it, without an error.
# So the memory of the inlined function is that of its caller.
#
# The last line of a location is the caller into which the preceding ones are inlined (`Location.line` in
# https://github.com/google/pprof/blob/main/proto/profile.proto). Profiles of Go and Rust have such locations. The library walks from callers to
# callees, and takes the lines of each location in their order (dist/analyzer.js, line 151). Below, `allocate` is inlined into `load`, which `main`
# calls, and has 3 MiB of 4. In the list of hotspots, both have them, so the shares add up to 175%.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" pprof-to-md@0.2.0 pprof-format@2.3.2
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import { writeFileSync } from "node:fs";
import { gzipSync } from "node:zlib";
import { Function, Line, Location, Profile, Sample, StringTable, ValueType } from "pprof-format";
import { convert } from "pprof-to-md";

const strings = new StringTable();
const type = (name, unit) => new ValueType({ type: strings.dedup(name), unit: strings.dedup(unit) });
const names = ["main", "load", "allocate", "cache"];
// A location for `main`, one for `allocate` inlined into `load`, and one for `cache`.
const profile = new Profile({
  stringTable: strings,
  sampleType: [type("inuse_space", "bytes")],
  periodType: type("space", "bytes"),
  period: 1,
  sample: [
    new Sample({ locationId: [2, 1], value: [3 * 2 ** 20] }),
    new Sample({ locationId: [3, 1], value: [2 ** 20] }),
  ],
  location: [[1], [3, 2], [4]].map((functions, index) => {
    return new Location({ id: index + 1, line: functions.map((id) => new Line({ functionId: id, line: id })) });
  }),
  function: names.map((name, index) => new Function({ id: index + 1, name: strings.dedup(name), filename: strings.dedup("main.go") })),
});
const path = `${process.argv[2]}/heap.pb.gz`;
writeFileSync(path, gzipSync(profile.encode()));
const report = convert(path, { format: "detailed", profileType: "heap", includeSource: false });
const kept = (line) => line.includes("main.go") && line.includes("%") && !line.startsWith("**");
console.log(report.split("\n").filter((line) => kept(line) || line.startsWith("- **Sample Type") || line.startsWith("### Hotspot")).join("\n"));
JAVASCRIPT
seen=$(node "$folder/program.mjs" "$folder")
expected='- **Sample Type:** inuse_space (bytes)
└── [  0.0% | 100.0%] main @ main.go:1
    ├── [  0.0% |  75.0%] allocate @ main.go:3
    │   └── [ 75.0% |  75.0%] load @ main.go:2  ◀ HOTSPOT
    └── [ 25.0% |  25.0%] cache @ main.go:4  ◀ HOTSPOT
### Hotspot #1: `allocate` (75.0%)
### Hotspot #2: `load` (75.0%)
### Hotspot #3: `cache` (25.0%)'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
