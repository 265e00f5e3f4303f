#!/usr/bin/env bash
# formulajs 1.0.8 (https://www.npmjs.com/package/formulajs) returns 0.205 for a cumulative binomial probability of 0.828, the ratio of two variances as the
# probability of an F-test, and 1.5 as the 30th percentile of 1 2 3 4, without an error.
#
# The library has the functions of Excel. BINOM.DIST converts its argument `true` to NaN (lib/statistical.js, line 143), so it is not cumulative. F.TEST
# is the probability that two variances are equal. PERCENTILE is the inclusive one, and the library has the exclusive one under this name
# (lib/compatibility.js, line 58). The density of BETA.DIST is not divided by the length of its interval. T.TEST ignores which test it is.
# FLOOR of -2.5 and -2 is -2 (https://support.microsoft.com/en-us/office/floor-function-14bb497c-24f2-4e04-b327-b0b4de5a8886). SciPy 1.17.1 computes the
# expected numbers.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, the npm registry, python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" formulajs@1.0.8
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scipy==1.17.1 numpy==2.4.6
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const formula = require("formulajs");

const first = [3, 4, 5, 8, 9, 1, 2, 4, 5];
const second = [6, 19, 3, 2, 14, 4, 5, 17, 1];
const show = (name, value) => console.log(`formulajs ${name}: ${value.toFixed(6)}`);
show("BINOM.DIST density", formula.BINOM.DIST(6, 10, 0.5, false));
show("BINOM.DIST cumulative", formula.BINOM.DIST(6, 10, 0.5, true));
show("POISSON.DIST cumulative", formula.POISSON.DIST(2, 5, true));
show("BETA.DIST density from 1 to 3", formula.BETA.DIST(2, 8, 10, false, 1, 3));
show("BETA.DIST cumulative from 1 to 3", formula.BETA.DIST(2, 8, 10, true, 1, 3));
show("F.TEST", formula.F.TEST([6, 7, 9, 15, 21], [20, 28, 31, 38, 40]));
show("T.TEST paired", formula.T.TEST(first, second, 2, 1));
show("T.TEST equal variances", formula.T.TEST(first, second, 2, 2));
show("T.TEST unequal variances", formula.T.TEST(first, second, 2, 3));
show("PERCENTILE", formula.PERCENTILE([1, 2, 3, 4], 0.3));
show("QUARTILE", formula.QUARTILE([1, 2, 3, 4], 1));
show("FLOOR", formula.FLOOR(-2.5, -2));
JAVASCRIPT
cat >"$folder/program.py" <<'PYTHON'
import numpy
from scipy import stats

first = [3, 4, 5, 8, 9, 1, 2, 4, 5]
second = [6, 19, 3, 2, 14, 4, 5, 17, 1]
ratio = numpy.var([6, 7, 9, 15, 21], ddof=1) / numpy.var([20, 28, 31, 38, 40], ddof=1)
below = stats.f.cdf(ratio, 4, 4)
for name, value in [
    ("BINOM.DIST density", stats.binom.pmf(6, 10, 0.5)),
    ("BINOM.DIST cumulative", stats.binom.cdf(6, 10, 0.5)),
    ("POISSON.DIST cumulative", stats.poisson.cdf(2, 5)),
    ("BETA.DIST density from 1 to 3", stats.beta.pdf(2, 8, 10, 1, 2)),
    ("BETA.DIST cumulative from 1 to 3", stats.beta.cdf(2, 8, 10, 1, 2)),
    ("F.TEST", 2 * min(below, 1 - below)),
    ("T.TEST paired", stats.ttest_rel(first, second).pvalue),
    ("T.TEST equal variances", stats.ttest_ind(first, second).pvalue),
    ("T.TEST unequal variances", stats.ttest_ind(first, second, equal_var=False).pvalue),
    ("PERCENTILE", numpy.percentile([1, 2, 3, 4], 30)),
    ("QUARTILE", numpy.percentile([1, 2, 3, 4], 25)),
    ("FLOOR", -2 * numpy.floor(-2.5 / -2)),
]:
    print(f"expected {name}: {value:.6f}")
PYTHON
seen=$(node "$folder/program.cjs"; "$folder/venv/bin/python" "$folder/program.py")
expected='formulajs BINOM.DIST density: 0.205078
formulajs BINOM.DIST cumulative: 0.205078
formulajs POISSON.DIST cumulative: 0.124652
formulajs BETA.DIST density from 1 to 3: 2.967529
formulajs BETA.DIST cumulative from 1 to 3: 0.685471
formulajs F.TEST: 0.614198
formulajs T.TEST paired: 0.191996
formulajs T.TEST equal variances: 0.191996
formulajs T.TEST unequal variances: 0.191996
formulajs PERCENTILE: 1.500000
formulajs QUARTILE: 1.750000
formulajs FLOOR: -4.000000
expected BINOM.DIST density: 0.205078
expected BINOM.DIST cumulative: 0.828125
expected POISSON.DIST cumulative: 0.124652
expected BETA.DIST density from 1 to 3: 1.483765
expected BETA.DIST cumulative from 1 to 3: 0.685471
expected F.TEST: 0.648318
expected T.TEST paired: 0.196016
expected T.TEST equal variances: 0.191996
expected T.TEST unequal variances: 0.202294
expected PERCENTILE: 1.900000
expected QUARTILE: 1.750000
expected FLOOR: -2.000000'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
