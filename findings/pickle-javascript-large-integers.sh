#!/usr/bin/env bash
# pickleparser 0.2.1 (https://www.npmjs.com/package/pickleparser) reads -80 GiB from a pickle as 1013612281856, and jpickle 0.4.1
# (https://www.npmjs.com/package/jpickle) reads 80 GiB as 0, without an error.
#
# From protocol 2 on, Python writes an integer beyond 32 bits with the opcode LONG1: the fewest bytes of its two's complement
# (https://peps.python.org/pep-0307/#pickling-of-large-longs). pickleparser fills them up with zeros instead of the sign (dist/index.js,
# line 88). jpickle skips the bytes and returns 0 (lib/jpickle.js, line 122). Carbon receives the metrics of Graphite as
# such pickles, and its documentation writes them with protocol 2.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20 and Python 3.11: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, the npm registry, and Python 3.8 or later.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" pickleparser@0.2.1 jpickle@0.4.1
cat >"$folder/write.py" <<'PYTHON'
import pickle
import sys

GIB = 1 << 30
values = {"small": -1, "one": GIB, "two": 2 * GIB, "eighty": 80 * GIB, "minus eighty": -80 * GIB, "float": -80.0 * GIB}
metrics = [(name, (1764590400, value)) for name, value in values.items()]
for protocol in 1, 2:
    with open(f"{sys.argv[1]}/{protocol}.pickle", "wb") as file:
        pickle.dump(metrics, file, protocol=protocol)
PYTHON
python3 "$folder/write.py" "$folder"
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const fs = require("fs");
const jpickle = require("jpickle");
const { Parser } = require("pickleparser");

const print = (name, metrics) => console.log(`${name}: ${metrics.map(([key, [, value]]) => `${key} ${value}`).join(", ")}`);
for (const protocol of [1, 2]) {
  const bytes = fs.readFileSync(`${process.argv[2]}/${protocol}.pickle`);
  print(`pickleparser, protocol ${protocol}`, new Parser().parse(bytes));
  print(`jpickle, protocol ${protocol}`, jpickle.loads(bytes.toString("binary")));
}
JAVASCRIPT
seen=$(node "$folder/program.cjs" "$folder")
expected='pickleparser, protocol 1: small -1, one 1073741824, two 2147483648, eighty 85899345920, minus eighty -85899345920, float -85899345920
jpickle, protocol 1: small -1, one 1073741824, two 2147483648, eighty 85899345920, minus eighty -85899345920, float -85899345920
pickleparser, protocol 2: small -1, one 1073741824, two 2147483648, eighty 85899345920, minus eighty 1013612281856, float -85899345920
jpickle, protocol 2: small -1, one 1073741824, two 0, eighty 0, minus eighty 0, float -85899345920'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
