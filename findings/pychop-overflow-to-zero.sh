#!/usr/bin/env bash
# pychop 0.6.2 (https://pypi.org/project/pychop) rounds 70000 to 0 in half precision, without an error.
#
# `Chop(5, 10)` emulates floats with 5 bits of exponent and 10 of fraction. The largest one is 65504. IEEE 754 rounds each number from 65520 on to
# infinity, as numpy does. Chop returns 65536, which the format does not have, for 65535. From 65536 to 131071, it returns 0 in each deterministic
# rounding mode, and infinity in the stochastic ones. From 131072 on, it returns infinity. bfloat16, E4M3 and E5M2 have the same fault: 300 is 0 in
# E4M3. So a computation that begins to diverge seems to vanish.
#
# The rounding modes 7 and 8 resolve ties toward zero and away from zero, according to the documentation of the class. For negative numbers, they are the
# other way.
#
# Seen on 1 December 2026 on x86-64 Linux, with numpy 2.4.6 and ml_dtypes 0.6.0: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pychop==0.6.2 numpy==2.4.6 ml_dtypes==0.6.0
cat >"$folder/program.py" <<'PYTHON'
import ml_dtypes
import numpy
import pychop

pychop.backend("numpy")


def show(name, exponent, fraction, type, values):
    values = numpy.array(values)
    with numpy.errstate(over="ignore"):
        expected = values.astype(type).astype(float)
    print(f"{name}: {values.tolist()}, pychop {pychop.Chop(exponent, fraction)(values).tolist()}, expected {expected.tolist()}")


show("half precision", 5, 10, numpy.float16, [0.1, 65504.0, 65535.0, 65536.0, 70000.0, -1e6, 1e300])
show("bfloat16", 8, 7, ml_dtypes.bfloat16, [0.1, 3.3e38, 3.5e38, 1e39])
show("E4M3 with infinities", 4, 3, ml_dtypes.float8_e4m3, [0.1, 240.0, 255.0, 300.0])
show("E5M2", 5, 2, ml_dtypes.float8_e5m2, [0.1, 57344.0, 70000.0])
tie = 1 + 2**-11
for mode in range(1, 10):
    large = pychop.Chop(5, 10, rmode=mode)(numpy.array([70000.0])).tolist()
    ties = pychop.Chop(5, 10, rmode=mode)(numpy.array([tie, -tie])) * 1024
    print(f"mode {mode}: 70000 is {large}" + (f", ties of 1024 and 1025 are {ties.tolist()}" if mode in (7, 8) else ""))
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py")
expected='half precision: [0.1, 65504.0, 65535.0, 65536.0, 70000.0, -1000000.0, 1e+300], pychop [0.0999755859375, 65504.0, 65536.0, 0.0, 0.0, -inf, inf], expected [0.0999755859375, 65504.0, inf, inf, inf, -inf, inf]
bfloat16: [0.1, 3.3e+38, 3.5e+38, 1e+39], pychop [0.10009765625, 3.2964854295465914e+38, 0.0, inf], expected [0.10009765625, 3.2964854295465914e+38, inf, inf]
E4M3 with infinities: [0.1, 240.0, 255.0, 300.0], pychop [0.1015625, 240.0, 256.0, 0.0], expected [0.1015625, 240.0, inf, inf]
E5M2: [0.1, 57344.0, 70000.0], pychop [0.09375, 57344.0, 0.0], expected [0.09375, 57344.0, inf]
mode 1: 70000 is [0.0]
mode 2: 70000 is [0.0]
mode 3: 70000 is [0.0]
mode 4: 70000 is [0.0]
mode 5: 70000 is [inf]
mode 6: 70000 is [inf]
mode 7: 70000 is [0.0], ties of 1024 and 1025 are [1024.0, -1025.0]
mode 8: 70000 is [0.0], ties of 1024 and 1025 are [1025.0, -1024.0]
mode 9: 70000 is [0.0]'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
