#!/usr/bin/env bash
# TensorStore 0.1.86 (https://pypi.org/project/tensorstore) returns 0 for each mean of floats with 8 or 4 bits, and NaN for the smallest and largest
# number of four of their types, without an error.
#
# `tensorstore.downsample` replaces some elements by their mean, median, minimum or maximum. Checkpoints of JAX are arrays of TensorStore, which has
# the 8-bit types of ml_dtypes. Their medians are right, and so are all results for bfloat16. A minimum starts with the infinity of its type
# (tensorstore/driver/downsample/downsample_nditerable.cc, `Initialize`), which is NaN for the types that have no infinity.
#
# Seen on 1 December 2026 on x86-64 Linux: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ml_dtypes==0.6.0 numpy==2.4.6 tensorstore==0.1.86
cat >"$folder/program.py" <<'PYTHON'
import ml_dtypes
import numpy
import tensorstore

names = "bfloat16 float8_e3m4 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float4_e2m1fn".split()
for name in names:
    weights = tensorstore.array(numpy.array([2, 4, 4, 4], getattr(ml_dtypes, name)))
    results = []
    for method in ("mean", "median", "min", "max"):
        pairs = tensorstore.downsample(weights, [2], method).read().result()
        results.append(f"{method} {pairs[0]} {pairs[1]}")
    print(f"{name}:", ", ".join(results))
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py")
expected='bfloat16: mean 3.0 4.0, median 2.0 4.0, min 2.0 4.0, max 4.0 4.0
float8_e3m4: mean 0.0 0.0, median 2.0 4.0, min 2.0 4.0, max 4.0 4.0
float8_e4m3b11fnuz: mean 0.0 0.0, median 2.0 4.0, min nan nan, max nan nan
float8_e4m3fn: mean 0.0 0.0, median 2.0 4.0, min nan nan, max nan nan
float8_e4m3fnuz: mean 0.0 0.0, median 2.0 4.0, min nan nan, max nan nan
float8_e5m2: mean 0.0 0.0, median 2.0 4.0, min 2.0 4.0, max 4.0 4.0
float8_e5m2fnuz: mean 0.0 0.0, median 2.0 4.0, min nan nan, max nan nan
float4_e2m1fn: mean 0.0 0.0, median 2.0 4.0, min 2.0 4.0, max 4.0 4.0'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
