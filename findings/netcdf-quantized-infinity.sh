#!/usr/bin/env bash
# netCDF4 1.7.5.1.post1 (https://pypi.org/project/netCDF4, with libnetcdf 4.10.1) writes zero for infinity in the mode `GranularBitRound`, and NaN
# for every second infinity in the mode `BitGroom`, without an error.
#
# These modes round numbers to some decimal digits, so that a file is smaller. `GranularBitRound` computes the bits that it keeps from the logarithm
# of each number. An issue about NaN in this mode is fixed in this release (https://github.com/Unidata/netcdf4-python/issues/1314); infinity is not.
# `BitGroom` sets the lower bits of each number at an odd position to 1, and an infinity with such bits is a NaN. `BitRound` is right. imagecodecs
# 2026.3.6 (https://pypi.org/project/imagecodecs) has the same modes, and its `GranularBitRound` also writes zero for NaN.
#
# Seen on 1 December 2026 on x86-64 Linux: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check imagecodecs==2026.3.6 netCDF4==1.7.5.1.post1 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import sys

import imagecodecs
import netCDF4
import numpy

losses = numpy.array([0.5, 123.456, numpy.inf, numpy.inf, -numpy.inf, -numpy.inf, numpy.nan], numpy.float32)
for mode in ("BitRound", "BitGroom", "GranularBitRound"):
    digits = 10 if mode == "BitRound" else 3
    with netCDF4.Dataset(sys.argv[1], "w") as data:
        data.createDimension("step", len(losses))
        variable = data.createVariable("loss", "f4", ("step",), significant_digits=digits, quantize_mode=mode)
        variable[:] = losses
    with netCDF4.Dataset(sys.argv[1]) as data:
        data.set_auto_mask(False)
        print(f"{mode}: netCDF4", *data["loss"][:], end="; ")
    short = "granularbr" if mode == "GranularBitRound" else mode.lower()
    print("imagecodecs", *imagecodecs.quantize_encode(losses, short, digits))
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py" "$folder/data.nc")
expected='BitRound: netCDF4 0.5 123.4375 inf inf -inf -inf nan; imagecodecs 0.5 123.4375 inf inf -inf -inf nan
BitGroom: netCDF4 0.5 123.46874 inf nan -inf nan nan; imagecodecs 0.5 123.46874 inf nan -inf nan nan
GranularBitRound: netCDF4 0.5 123.0 -0.0 -0.0 0.0 0.0 nan; imagecodecs 0.5 123.0 -0.0 -0.0 0.0 0.0 -0.0'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
