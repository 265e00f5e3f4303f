#!/usr/bin/env bash
# kubernetes-resource-parser 0.1.0 (https://www.npmjs.com/package/kubernetes-resource-parser) reads the usage of half a CPU as 500 million CPUs, and a
# limit of 1.5 GiB of memory as 1 byte, without an error.
#
# The metrics API of Kubernetes returns the usage of a CPU in billionths, as 500000000n. The library knows only the unit m, and `parseFloat` drops the
# others (index.js, line 7). For memory, the number has to be an integer (line 26); from 1.5Gi and 129e6, `parseInt` takes the first digits. All
# of them are quantities (https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/), and
# their values below follow from that definition.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" kubernetes-resource-parser@0.1.0
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import { cpuParser, memoryParser } from "kubernetes-resource-parser";

const cpus = { "500m": 0.5, "0.5": 0.5, "500000u": 0.5, "500000000n": 0.5, "2k": 2000 };
for (const [quantity, value] of Object.entries(cpus)) console.log(`CPUs ${quantity}: ${cpuParser(quantity)} instead of ${value}`);
const bytes = { "1536Mi": 1610612736, "1.5Gi": 1610612736, "0.5Gi": 536870912, "129e6": 129000000, "1E3": 1000, "128974848000m": 128974848 };
for (const [quantity, value] of Object.entries(bytes)) console.log(`bytes ${quantity}: ${memoryParser(quantity)} instead of ${value}`);
JAVASCRIPT
seen=$(node "$folder/program.mjs")
expected='CPUs 500m: 0.5 instead of 0.5
CPUs 0.5: 0.5 instead of 0.5
CPUs 500000u: 500000 instead of 0.5
CPUs 500000000n: 500000000 instead of 0.5
CPUs 2k: 2 instead of 2000
bytes 1536Mi: 1610612736 instead of 1610612736
bytes 1.5Gi: 1 instead of 1610612736
bytes 0.5Gi: 0 instead of 536870912
bytes 129e6: 129 instead of 129000000
bytes 1E3: 1 instead of 1000
bytes 128974848000m: NaN instead of 128974848'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
