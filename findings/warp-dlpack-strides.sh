#!/usr/bin/env bash
# Warp 1.19.0 (https://pypi.org/project/warp-lang) exports wrong values with DLPack, without an error, if the distance between two elements of an array
# is no multiple of the size of its numbers.
#
# Packed records have such distances: a position of three 32-bit numbers and a label of one byte have 13 bytes. `warp.array` with `copy=False`
# accepts a field of these records, and Warp reads it correctly, because it counts distances in bytes. DLPack counts them in numbers. The
# export divides 13 by 4 and drops the rest (warp/_src/dlpack.py, line 293). So the receiver reads the second position one byte too early,
# and the third two bytes. NumPy refuses to export the same field. The array here is on the CPU; arrays on a GPU use the same function.
#
# Seen on 30 November 2026 on x86-64 Linux, without a GPU, also with Warp 1.5.0: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check warp-lang==1.19.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import numpy
import warp

record = numpy.dtype([("position", "<i4", 3), ("label", "u1")])
points = numpy.zeros(4, record)
points["position"] = numpy.arange(12).reshape(4, 3)
field = points["position"]
array = warp.array(field, dtype=warp.vec3i, device="cpu", copy=False)
received = numpy.from_dlpack(array)
print("bytes between points:", array.strides[0], "in Warp,", received.strides[0], "after DLPack")
for index in range(2):
    print(f"point {index}:", *array.numpy()[index], "in Warp,", *received[index], "after DLPack")
print("equal points:", int((array.numpy() == received).all(axis=1).sum()), "of 4")
try:
    numpy.from_dlpack(field)
    print("numpy: exported")
except BufferError:
    print("numpy: refused")
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | grep -E '^(bytes between|point|equal|numpy)')
expected='bytes between points: 13 in Warp, 12 after DLPack
point 0: 0 1 2 in Warp, 0 1 2 after DLPack
point 1: 3 4 5 in Warp, 768 1024 1280 after DLPack
equal points: 1 of 4
numpy: refused'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
