#!/usr/bin/env bash
# numcodecs 0.16.6 (https://pypi.org/project/numcodecs) stores 100 as infinity if float16 is quantized to three digits, and so it stores netCDF's fill
# value of float32. BitRound turns the NaN with all bits into 0.
#
# The filter Quantize of Zarr keeps a number of decimal digits. It multiplies by a power of two, rounds, and divides (numcodecs/quantize.py), all in
# the type of the data. So float16 overflows from 64 on, and float32 at 3.3e35: the default fill value of netCDF, 9.97e36, no longer marks missing
# values. NumPy warns of an overflow where the chunk is written, and no reader can know. BitRound (numcodecs/bitround.py) adds half of the last bit
# that it keeps to the bits of a NaN, as to any number.
# numcodecs 0.17.1, which needs Python 3.12, has the same output.
#
# Seen on 1 December 2026 on x86-64 Linux: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numcodecs==0.16.6 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import warnings

import numcodecs
import numpy

warnings.simplefilter("ignore", RuntimeWarning)
fill = numpy.float32(9.969209968386869e36)
for kind, values in (("<f2", [1.5, 63.5, 64, 100, 60000]), ("<f4", [1.5, 100, 1e35, fill]), ("<f8", [1.5, 100, 60000, fill])):
    values = numpy.array(values, kind)
    codec = numcodecs.Quantize(digits=3, dtype=kind)
    print(f"Quantize, {kind}, 3 digits:", *(f"{value:.6g} -> {read:.6g}" for value, read in zip(values, codec.decode(codec.encode(values)))))
bits = numpy.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF], numpy.uint32)
codec = numcodecs.BitRound(keepbits=10)
rounded = codec.decode(codec.encode(bits.view(numpy.float32))).view(numpy.float32)
print("BitRound:", *(f"NaN {before:#x} -> {after}" for before, after in zip(bits, rounded)))
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py")
expected='Quantize, <f2, 3 digits: 1.5 -> 1.5 63.5 -> 63.5 64 -> inf 100 -> inf 60000 -> inf
Quantize, <f4, 3 digits: 1.5 -> 1.5 100 -> 100 1e+35 -> 1e+35 9.96921e+36 -> inf
Quantize, <f8, 3 digits: 1.5 -> 1.5 100 -> 100 60000 -> 60000 9.96921e+36 -> 9.96921e+36
BitRound: NaN 0x7fc00000 -> nan NaN 0x7fffffff -> -0.0 NaN 0xffffffff -> 0.0'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
