#!/usr/bin/env bash
# ieee754 0.11 (https://pypi.org/project/ieee754) writes 0.1 with a wrong last bit in half and double precision, 70000 as NaN in half precision, and 16777216
# with 17 bits there, without an error.
#
# IEEE 754 rounds to the nearest number, and to infinity if a number is too large. The package sets the last bit to 1 if it cuts others
# (ieee754/IEEE754.py, line 192), and writes the exponent without an upper limit. An exponent that has only ones is NaN or infinity, and a larger one
# adds a bit, so the other bits move. Numbers that need no rounding are right. numpy 2.4.6 computes the expected bits.
#
# Seen on 1 December 2026 on x86-64 Linux: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ieee754==0.11 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import ieee754
import numpy

for name, precision, kind, bits, values in [
    ("half", 0, "f2", "u2", [0.5, 0.1, 1.9999, 65504.0, 70000.0, 16777216.0]),
    ("single", 1, "f4", "u4", [0.5, 0.1, 1 / 3, 1e-5, 16777219.0, 3.5e38]),
    ("double", 2, "f8", "u8", [0.5, 0.1, 1 / 3, 1e-5, 1e-7]),
]:
    for value in values:
        seen = str(ieee754.IEEE754(value, precision)).replace(" ", "")
        with numpy.errstate(over="ignore"):
            number = numpy.array([value]).astype(kind)
        expected = format(int(number.view(bits)[0]), f"0{int(bits[1]) * 8}b")
        text = f"{len(seen)} bits"
        if len(seen) == len(expected):
            read = numpy.array([int(seen, 2)], bits).view(kind)[0]
            text += f", which are {float(read)!r}"
        print(f"{name} {value!r}: {int(seen, 2):x}, {text}; expected {int(expected, 2):x}")
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py")
expected='half 0.5: 3800, 16 bits, which are 0.5; expected 3800
half 0.1: 2e67, 16 bits, which are 0.10003662109375; expected 2e66
half 1.9999: 3fff, 16 bits, which are 1.9990234375; expected 4000
half 65504.0: 7bff, 16 bits, which are 65504.0; expected 7bff
half 70000.0: 7c45, 16 bits, which are nan; expected 7c00
half 16777216.0: 9c01, 17 bits; expected 7c00
single 0.5: 3f000000, 32 bits, which are 0.5; expected 3f000000
single 0.1: 3dcccccd, 32 bits, which are 0.10000000149011612; expected 3dcccccd
single 0.3333333333333333: 3eaaaaab, 32 bits, which are 0.3333333432674408; expected 3eaaaaab
single 1e-05: 3727c5ad, 32 bits, which are 1.0000000656873453e-05; expected 3727c5ac
single 16777219.0: 4b800001, 32 bits, which are 16777218.0; expected 4b800002
single 3.5e+38: 7f83a7c7, 32 bits, which are nan; expected 7f800000
double 0.5: 3fe0000000000000, 64 bits, which are 0.5; expected 3fe0000000000000
double 0.1: 3fb9999999999999, 64 bits, which are 0.09999999999999999; expected 3fb999999999999a
double 0.3333333333333333: 3fd5555555555555, 64 bits, which are 0.3333333333333333; expected 3fd5555555555555
double 1e-05: 3ee4f8b588e368f1, 64 bits, which are 1e-05; expected 3ee4f8b588e368f1
double 1e-07: 3e7ad7f29abcaf49, 64 bits, which are 1.0000000000000001e-07; expected 3e7ad7f29abcaf48'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
