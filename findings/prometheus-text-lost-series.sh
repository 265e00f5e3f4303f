#!/usr/bin/env bash
# parse-prometheus-text-format 1.1.1 (https://www.npmjs.com/package/parse-prometheus-text-format) returns only the last of several histograms with
# labels, without its labels, sum and count, and without an error. Summaries are the same.
#
# prom-client 15.1.3 writes the text. Each combination of labels is a histogram of its own ("Histograms and summaries" in
# https://prometheus.io/docs/instrumenting/exposition_formats/). The parser collects the buckets of all of them in one object, so later ones replace
# earlier ones. A histogram without labels is complete, and so are counters and gauges with labels.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" parse-prometheus-text-format@1.1.1 prom-client@15.1.3
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import module from "parse-prometheus-text-format";
import client from "prom-client";

const parse = module.default ?? module;
const options = { help: "A test.", buckets: [1], percentiles: [0.5] };
const metrics = {
  plain: new client.Histogram({ ...options, name: "plain" }),
  waits: new client.Histogram({ ...options, name: "waits", labelNames: ["gpu"] }),
  sizes: new client.Summary({ ...options, name: "sizes", labelNames: ["gpu"] }),
  faults: new client.Counter({ ...options, name: "faults", labelNames: ["gpu"] }),
};
metrics.plain.observe(0.5);
metrics.waits.observe({ gpu: "0" }, 0.5);
[0.5, 3, 4].forEach((value) => metrics.waits.observe({ gpu: "1" }, value));
metrics.sizes.observe({ gpu: "0" }, 10);
metrics.sizes.observe({ gpu: "1" }, 20);
metrics.faults.inc({ gpu: "0" }, 1);
metrics.faults.inc({ gpu: "1" }, 2);
const text = await client.register.metrics();
console.log(text.split("\n").filter((line) => line.startsWith("waits")).join("\n"));
parse(text).forEach(({ name, metrics }) => console.log(`parsed ${name}: ${JSON.stringify(metrics)}`));
JAVASCRIPT
seen=$(node "$folder/program.mjs")
expected='waits_bucket{le="1",gpu="0"} 1
waits_bucket{le="+Inf",gpu="0"} 1
waits_sum{gpu="0"} 0.5
waits_count{gpu="0"} 1
waits_bucket{le="1",gpu="1"} 1
waits_bucket{le="+Inf",gpu="1"} 3
waits_sum{gpu="1"} 7.5
waits_count{gpu="1"} 3
parsed plain: [{"buckets":{"1":"1","+Inf":"1"},"count":"1","sum":"0.5"}]
parsed waits: [{"buckets":{"1":"1","+Inf":"3"}}]
parsed sizes: [{"quantiles":{"0.5":"20"}}]
parsed faults: [{"value":"1","labels":{"gpu":"0"}},{"value":"2","labels":{"gpu":"1"}}]'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
