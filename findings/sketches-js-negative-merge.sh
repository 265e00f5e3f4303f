#!/usr/bin/env bash
# @datadog/sketches-js 2.1.1 (https://www.npmjs.com/package/@datadog/sketches-js) loses the negative values of a sketch that is merged into another
# one, without an error. It still counts them, so each quantile is wrong.
#
# A DDSketch keeps positive and negative values in two stores, and can be merged without a loss. `merge` joins the positive stores and adds zeros,
# counts and sums (dist/ddsketch/DDSketch.js, line 110); nothing reads the negative store. Into an empty sketch, both are copied. Differences of
# memory have such values: after a merge, the median of 100 rises and 100 equal falls is 100 instead of about 0.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" @datadog/sketches-js@2.1.1
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import sketches from "@datadog/sketches-js";

function sketch(values) {
  const result = new sketches.DDSketch({ relativeAccuracy: 0.01 });
  values.forEach((value) => result.accept(value));
  return result;
}

const rises = Array.from({ length: 100 }, (_, index) => index + 1);
const falls = rises.map((value) => -value);
const merged = sketch(rises);
merged.merge(sketch(falls));
const copied = sketch([]);
copied.merge(sketch([...rises, ...falls]));
const rows = { "one sketch": sketch([...rises, ...falls]), "merged into rises": merged, "merged into nothing": copied };
for (const [name, { count, sum, min, ...rest }] of Object.entries(rows)) {
  const quantiles = [0, 0.25, 0.5, 0.75, 1].map((quantile) => rows[name].getValueAtQuantile(quantile).toFixed(1));
  const kept = rest.store.count + rest.negativeStore.count;
  console.log(`${name}: count ${count}, kept ${kept}, sum ${sum}, min ${min}, quantiles ${quantiles.join(" ")}`);
}
JAVASCRIPT
seen=$(node "$folder/program.mjs")
expected='one sketch: count 200, kept 200, sum 0, min -100, quantiles -100.5 -50.9 -1.0 49.9 100.5
merged into rises: count 200, kept 100, sum 0, min -100, quantiles 1.0 49.9 100.5 100.5 100.5
merged into nothing: count 200, kept 200, sum 0, min -100, quantiles -100.5 -50.9 -1.0 49.9 100.5'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
