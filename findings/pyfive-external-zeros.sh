#!/usr/bin/env bash
# pyfive 1.3.0 (https://pypi.org/project/pyfive) returns zeros, without an error, for a dataset of HDF5 whose numbers are in another file. It also
# returns wrong integers if they use fewer bits than they occupy.
#
# HDF5 can keep the numbers of a dataset in raw files that it names, for example those of a measuring device. For pyfive, such a dataset has no numbers yet. A
# type of HDF5 has a precision and an offset in bits: numbers of 12 bits can be the upper or the lower ones of 16. pyfive reads all 16.
# So in the upper bits, each number is multiplied by 16, and in the lower bits, negative numbers become positive. h5py reads all of them.
#
# Seen on 30 November 2026 on x86-64 Linux, with h5py 3.16.0: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyfive==1.3.0 h5py==3.16.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import os
import sys

import h5py
import numpy
import pyfive

path = os.path.join(sys.argv[1], "file.h5")
values = numpy.array([1, -2, 100, 2047], "<i2")


def write(file, name, offset):
    kind = h5py.h5t.STD_I16LE.copy()
    kind.set_precision(12)
    kind.set_offset(offset)
    h5py.h5d.create(file.id, name, kind, h5py.h5s.create_simple(values.shape)).write(h5py.h5s.ALL, h5py.h5s.ALL, values)


with h5py.File(path, "w") as file:
    raw = os.path.join(sys.argv[1], "raw.bin")
    file.create_dataset("another file", values.shape, values.dtype, external=[(raw, 0, values.nbytes)])[:] = values
    write(file, b"lower 12 bits", 0)
    write(file, b"upper 12 bits", 4)
with h5py.File(path) as file, pyfive.File(path) as other:
    for name in file:
        print(f"{name}: h5py {file[name][:].tolist()}, pyfive {other[name][:].tolist()}")
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py" "$folder")
expected='another file: h5py [1, -2, 100, 2047], pyfive [0, 0, 0, 0]
lower 12 bits: h5py [1, -2, 100, 2047], pyfive [1, 4094, 100, 2047]
upper 12 bits: h5py [1, -2, 100, 2047], pyfive [16, -32, 1600, 32752]'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
