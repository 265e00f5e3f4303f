#!/usr/bin/env bash
# blosc2 4.14.1 (https://pypi.org/project/blosc2) divides arrays of integers without a remainder if it computes the whole result, and with
# the fraction if it computes a few rows.
#
# `used / total` of two arrays of integers is an expression whose type is a 64-bit float. `expression[30:33]` evaluates three rows with NumPy.
# `expression[:]`, `expression.compute()`, `expression.max()` and `expression.mean()` evaluate chunks with numexpr (blosc2/lazyexpr.py, line 166)
# without the option `truediv`, so numexpr divides integers as C does. The quotients are then stored as floats. So each share of memory below 1 is
# 0.0. A division by a number instead of an array is right.
#
# The remainder of a negative number has the sign of the dividend, as in C; NumPy's has the sign of the divisor.
#
# Seen on 30 November 2026 on x86-64 Linux, with numexpr 2.14.2: the lines in `expected` below. In blosc2 3.3.4, the three rows are 0
# too, and the type is int64.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check blosc2==4.14.1 numexpr==2.14.2 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import blosc2
import numpy

GIB, ROWS = 1 << 30, 100_000
used = numpy.arange(ROWS) % 60 * GIB
total = numpy.full(ROWS, 80 * GIB)
share = blosc2.asarray(used) / blosc2.asarray(total)
expected = used / total
print("type:", numpy.dtype(share.dtype).name)
print("numpy, rows 30 to 32:", expected[30:33])
print("rows 30 to 32:", share[30:33])
print("rows 30 to 32 of all rows:", share[:][30:33])
print("rows 30 to 32, computed:", share.compute()[30:33])
print(f"maximum: {share.max()}, numpy: {expected.max()}")
print(f"mean: {share.mean():.4f}, numpy: {expected.mean():.4f}")
print("divided by a number:", (blosc2.asarray(used) / (80 * GIB)).compute()[30:33])
seven = numpy.full(ROWS, 7)
print("remainders of -1 to -3:", (blosc2.asarray(-numpy.arange(ROWS)) % blosc2.asarray(seven)).compute()[1:4])
print("numpy:", (-numpy.arange(ROWS) % seven)[1:4])
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py")
expected='type: float64
numpy, rows 30 to 32: [0.375  0.3875 0.4   ]
rows 30 to 32: [0.375  0.3875 0.4   ]
rows 30 to 32 of all rows: [0. 0. 0.]
rows 30 to 32, computed: [0. 0. 0.]
maximum: 0.0, numpy: 0.7375
mean: 0.0000, numpy: 0.3687
divided by a number: [0.375  0.3875 0.4   ]
remainders of -1 to -3: [-1 -2 -3]
numpy: [6 5 4]'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
