#!/usr/bin/env bash
# The CUDA simulator of numba-cuda 0.30.4 (https://pypi.org/project/numba-cuda) counts one set bit in -1, has no cube root of negative numbers, and
# adds integers of 32 bits in 32 bits, where a kernel adds them in 64.
#
# With `NUMBA_ENABLE_CUDASIM=1`, kernels run as Python functions without a GPU. `cuda.popc` counts the digits 1 of Python's `bin`
# (numba/cuda/simulator/kernelapi.py, line 435), which writes a negative number as a sign and its absolute value. `cuda.cbrt` is a power of 1/3
# (line 441), so it returns NaN for -27. Compiled kernels have the instruction `popc.b32`, which counts 32 bits in -1, and `add.s64`. The simulator
# leaves additions to NumPy, which wraps them.
#
# Seen on 1 December 2026 on x86-64 Linux, without a GPU: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numba==0.68.1 numba-cuda==0.30.4 numpy==2.4.6 nvidia-cuda-runtime==13.5.37 nvidia-cuda-nvrtc==13.5.37 nvidia-nvvm==13.5.37
cat >"$folder/program.py" <<'PYTHON'
import re

import numpy
from numba import config, cuda, int32, int64


def count(values, results):
    results[0] = cuda.popc(values[0])


def cube_root(values, results):
    results[0] = cuda.cbrt(values[0])


def add(values, results):
    results[0] = values[0] + values[1]


def simulate(kernel, *values):
    type_of_values = numpy.float64 if kernel is cube_root else numpy.int32
    results = numpy.zeros(1, numpy.float64 if kernel is cube_root else numpy.int64)
    cuda.jit(kernel)[1, 1](numpy.array(values, type_of_values), results)
    return results[0]


if config.ENABLE_CUDASIM:
    print("simulated, set bits in 255 and -1:", simulate(count, 255), simulate(count, -1))
    print("simulated, cube roots of 27 and -27:", round(simulate(cube_root, 27), 6), simulate(cube_root, -27))
    print("simulated, 2147483647 + 1:", simulate(add, 2**31 - 1, 1))
else:
    for kernel in (count, add):
        ptx, _ = cuda.compile_ptx(kernel, (int32[::1], int64[::1]), cc=(8, 0))
        print(f"compiled, {kernel.__name__}:", *re.findall(r"(?:popc|add)\.\w+", ptx))
PYTHON
seen=$(for simulator in 1 0; do NUMBA_ENABLE_CUDASIM=$simulator "$folder/venv/bin/python" -W ignore "$folder/program.py"; done)
expected='simulated, set bits in 255 and -1: 8 1
simulated, cube roots of 27 and -27: 3.0 nan
simulated, 2147483647 + 1: -2147483648
compiled, count: popc.b32
compiled, add: add.s64'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
