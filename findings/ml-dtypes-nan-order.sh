#!/usr/bin/env bash
# `numpy.sort` puts the numbers of ml_dtypes 0.6.0 (https://pypi.org/project/ml_dtypes) into a wrong order, without an error, if one of them is a
# NaN.
#
# ml_dtypes adds bfloat16 and numbers of 8 bits to NumPy, for example for JAX and for checkpoints. For float16 and float32, `numpy.sort` moves NaNs
# to the end. The comparison that ml_dtypes registers with NumPy calls a NaN equal to each number (ml_dtypes/_src/custom_float.h, line 568). So the
# other numbers are not sorted either, and `numpy.unique` returns duplicates. The sources after the release move NaNs to the end.
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

losses = [3, numpy.nan, 1, 4, numpy.nan, 2, 4]
for kind in (numpy.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
    array = numpy.array(losses, kind)
    print(f"{numpy.dtype(kind).name}: sorted", *numpy.sort(array), end="; ")
    print("order", *numpy.argsort(array, stable=True), end="; ")
    print("different", *numpy.unique(array))
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py")
expected='float16: sorted 1.0 2.0 3.0 4.0 4.0 nan nan; order 2 5 0 3 6 1 4; different 1.0 2.0 3.0 4.0 nan
bfloat16: sorted 3 nan 1 4 nan 2 4; order 0 1 2 3 4 5 6; different 3 nan 1 4 nan 2 4
float8_e4m3fn: sorted 3 nan 1 4 nan 2 4; order 0 1 2 3 4 5 6; different 3 nan 1 4 nan 2 4
float8_e5m2: sorted 3 nan 1 4 nan 2 4; order 0 1 2 3 4 5 6; different 3 nan 1 4 nan 2 4'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
