#!/usr/bin/env bash
# awkward 2.14.0 (https://pypi.org/project/awkward) moves missing values, without an error, if it reads a part of an Arrow array.
#
# A part of an Arrow array shares the buffers of the whole array and has an offset. `ak.from_arrow` applies the offset to the values, but not to
# the bitmap of missing values (awkward/_connect/pyarrow/conversions.py, from line 120). So a value of the part is missing if the value at its
# position in the whole array is, and a missing value becomes 0. Batches of a larger table are such parts. Arrays without
# missing values are right, and so are parts that start at the first value.
#
# Seen on 30 November 2026 on x86-64 Linux, with pyarrow 26.0.1 and 20.0.0: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check awkward==2.14.0 pyarrow==26.0.1 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import awkward
import pyarrow

values = pyarrow.array([1, None, 3, None, 5, 6])
for start in range(4):
    part = values[start:]
    print(f"from {start}: {part.to_pylist()}, awkward {awkward.from_arrow(part).to_list()}")
table = pyarrow.table({"bytes": values})
for index, batch in enumerate(table.to_batches(max_chunksize=2)):
    print(f"batch {index}: {batch['bytes'].to_pylist()}, awkward {awkward.from_arrow(batch)['bytes'].to_list()}")
complete = pyarrow.array(range(6))
print("nothing missing:", awkward.from_arrow(complete[1:]).to_list())
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py")
expected='from 0: [1, None, 3, None, 5, 6], awkward [1, None, 3, None, 5, 6]
from 1: [None, 3, None, 5, 6], awkward [0, None, 0, None, 6]
from 2: [3, None, 5, 6], awkward [3, None, 5, None]
from 3: [None, 5, 6], awkward [0, None, 6]
batch 0: [1, None], awkward [1, None]
batch 1: [3, None], awkward [3, None]
batch 2: [5, 6], awkward [5, None]
nothing missing: [1, 2, 3, 4, 5]'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
