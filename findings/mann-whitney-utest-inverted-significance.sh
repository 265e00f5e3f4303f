#!/usr/bin/env bash
# mann-whitney-utest 1.0.5 (https://www.npmjs.com/package/mann-whitney-utest) calls a difference of two samples significant if p is 0.2, and not
# significant if p is 0.0000004, without an error.
#
# U is the number of pairs whose first value is larger, so it grows with the samples. `criticalValue` returns the number of standard deviations between U
# and its mean, and `significant` compares the two numbers (src/mann-whitney.js, line 111). So samples of three values are nearly always significant. In
# samples of 30 values, U must be below 7 of 900. @tainakanchu/mann-whitney-utest 1.1.0 (https://www.npmjs.com/package/@tainakanchu/mann-whitney-utest)
# does the same. U and the deviations are right. SciPy 1.17.1 computes p.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, the npm registry, python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" mann-whitney-utest@1.0.5 @tainakanchu/mann-whitney-utest@1.1.0
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scipy==1.17.1
cat >"$folder/samples.json" <<'JSON'
[
  [[1, 2, 4], [3, 5, 6]],
  [[1, 3, 5, 7], [2, 6, 8, 9]],
  [[1, 3, 5, 7, 9, 11, 13, 15, 17, 19], [8, 10, 12, 14, 16, 18, 20, 22, 24, 26]],
  [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30],
   [16.5, 17.5, 18.5, 19.5, 20.5, 21.5, 22.5, 23.5, 24.5, 25.5, 26.5, 27.5, 28.5, 29.5, 30.5, 31.5, 32.5, 33.5, 34.5, 35.5, 36.5, 37.5, 38.5, 39.5, 40.5,
    41.5, 42.5, 43.5, 44.5, 45.5]]
]
JSON
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const library = require("mann-whitney-utest");
const other = require("@tainakanchu/mann-whitney-utest");

for (const samples of require("./samples.json")) {
  const u = library.test(samples);
  console.log(
    `${samples[0].length} values: U ${Math.min(...u)}, deviations ${library.criticalValue(u, samples).toFixed(2)}, ` +
      `mann-whitney-utest ${library.significant(u, samples)}, @tainakanchu ${other.significant(u, samples)}`,
  );
}
JAVASCRIPT
cat >"$folder/program.py" <<'PYTHON'
import json
import sys

import scipy.stats

for first, second in json.load(open(sys.argv[1])):
    result = scipy.stats.mannwhitneyu(first, second)
    print(f"{len(first)} values: U {result.statistic:g}, SciPy p {result.pvalue:.2g}, below 0.05: {result.pvalue < 0.05}")
PYTHON
seen=$(node "$folder/program.cjs"; "$folder/venv/bin/python" "$folder/program.py" "$folder/samples.json")
expected='3 values: U 1, deviations 1.53, mann-whitney-utest true, @tainakanchu true
4 values: U 4, deviations 1.15, mann-whitney-utest false, @tainakanchu false
10 values: U 21, deviations 2.19, mann-whitney-utest false, @tainakanchu false
30 values: U 105, deviations 5.10, mann-whitney-utest false, @tainakanchu false
3 values: U 1, SciPy p 0.2, below 0.05: False
4 values: U 4, SciPy p 0.34, below 0.05: False
10 values: U 21, SciPy p 0.031, below 0.05: True
30 values: U 105, SciPy p 3.5e-07, below 0.05: True'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
