#!/usr/bin/env bash
# The mean of four 7s is -1 for `numpy.mean` and int4 of ml_dtypes 0.6.0 (https://pypi.org/project/ml_dtypes), without an error.
#
# `numpy.mean` computes the mean of integers as a 64-bit float, according to its documentation. It does so for the integer types of NumPy only. It
# adds numbers of ml_dtypes in their own type, so sums of int4 wrap at 8, and the quotient is an int4 too. Standard deviations are wrong for the
# same reason. The mean of many ones is 0. With `dtype=numpy.float64`, results are right. That sums of bfloat16 are inexact is known
# (https://github.com/jax-ml/ml_dtypes/issues/63).
#
# Seen on 1 December 2026 on x86-64 Linux, with NumPy 2.4.6: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ml_dtypes==0.6.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import ml_dtypes
import numpy

for weights in ([7, 7, 7, 7], [3, -2, 5, 1], [1] * 16):
    for kind in (numpy.int8, ml_dtypes.int4):
        array = numpy.array(weights, kind)
        name = numpy.dtype(kind).name
        text = f"{weights[0]} x {len(weights)}" if len(set(weights)) == 1 else str(weights)
        print(f"{text} as {name}: mean {array.mean()}, standard deviation {float(array.std()):.3g}", end=", ")
        print(f"mean as float64 {array.mean(dtype=numpy.float64)}")
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py")
expected='7 x 4 as int8: mean 7.0, standard deviation 0, mean as float64 7.0
7 x 4 as int4: mean -1, standard deviation 0, mean as float64 7.0
[3, -2, 5, 1] as int8: mean 1.75, standard deviation 2.59, mean as float64 1.75
[3, -2, 5, 1] as int4: mean 1, standard deviation 0, mean as float64 1.75
1 x 16 as int8: mean 1.0, standard deviation 0, mean as float64 1.0
1 x 16 as int4: mean 0, standard deviation 0, mean as float64 1.0'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
