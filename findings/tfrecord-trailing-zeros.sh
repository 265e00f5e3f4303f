#!/usr/bin/env bash
# tfrecord 1.14.6 (https://pypi.org/project/tfrecord) removes zero bytes from the end of byte strings, without an error, if a feature has several
# strings.
#
# A feature of a TFRecord is a list of integers, floats or byte strings. The writer writes byte strings correctly. The reader puts several of them
# into an array of NumPy for text, which has no zero bytes at its end (tfrecord/reader.py, line 126). A tensor of small integers ends with zero
# bytes, so `numpy.frombuffer` fails, or returns fewer integers if the rest has a possible length. A single string is returned as it is.
#
# Seen on 1 December 2026 on x86-64 Linux, with NumPy 2.4.6: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 tfrecord==1.14.6
cat >"$folder/program.py" <<'PYTHON'
import sys

import numpy
import tfrecord
from tfrecord import example_pb2

masks = [numpy.array(mask, "<i2") for mask in ([7, 8, 0, 0], [7, 8, 9, 256], [0, 0, 0, 0])]
writer = tfrecord.TFRecordWriter(sys.argv[1])
writer.write({"masks": ([mask.tobytes() for mask in masks], "byte"), "mask": (masks[0].tobytes(), "byte")})
writer.close()
[record] = tfrecord.tfrecord_iterator(sys.argv[1])
in_file = example_pb2.Example.FromString(record).features.feature["masks"].bytes_list.value
[read] = tfrecord.tfrecord_loader(sys.argv[1], None)
for mask, text, written in zip(masks, read["masks"], in_file):
    print(*mask, f"are {mask.nbytes} bytes: {len(written)} in the file, {len(text)} returned")
print("a mask that is alone:", *numpy.frombuffer(read["mask"], "<i2"))
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py" "$folder/data")
expected='7 8 0 0 are 8 bytes: 8 in the file, 3 returned
7 8 9 256 are 8 bytes: 8 in the file, 8 returned
0 0 0 0 are 8 bytes: 8 in the file, 0 returned
a mask that is alone: 7 8 0 0'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
