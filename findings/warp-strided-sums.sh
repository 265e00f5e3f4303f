#!/usr/bin/env bash
# Warp 1.19.0 (https://pypi.org/project/warp-lang) sums other numbers, without an error, if an array is a column or every second row of another one.
#
# `array_sum`, `array_inner` and `runlength_encode` of `warp.utils` read neighbours in memory, because they use the size of an element instead of
# the stride (for the sum: warp/_src/utils.py, line 751). Their documentation has no limit on the layout. With an axis, both sums are right.
# `array_scan` is right for them, and `radix_sort_pairs` refuses such an array.
#
# Seen on 1 December 2026 on x86-64 Linux, without a GPU: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 warp-lang==1.19.0
cat >"$folder/program.py" <<'PYTHON'
import warp
from warp import utils

warp.config.log_level = warp.LOG_ERROR

table = warp.array([[1, 100], [2, 200], [3, 300], [4, 400]], dtype=warp.float32, device="cpu")
views = {"first column": table[:, 0], "its copy": table[:, 0].contiguous(), "every second row": table[::2]}
for name, view in views.items():
    values = view.numpy()
    print(f"{name}: sum {utils.array_sum(view):.0f}, expected {values.sum():.0f}", end="; ")
    print(f"inner product {utils.array_inner(view, view):.0f}, expected {(values * values).sum():.0f}")
column = views["first column"]
print("with an axis:", *utils.array_sum(column, axis=0).numpy(), *utils.array_inner(column, column, axis=0).numpy())

identifiers = warp.array([[7, 1], [7, 2], [7, 3], [8, 4]], dtype=warp.int32, device="cpu")[:, 0]
values, lengths = (warp.zeros(4, dtype=warp.int32, device="cpu") for _ in range(2))
count = utils.runlength_encode(identifiers, values, lengths)
print("runs of", *identifiers.numpy(), "are", *zip(values.numpy()[:count].tolist(), lengths.numpy()[:count].tolist()))
utils.array_scan(identifiers, values)
print("scan:", *values.numpy())
try:
    utils.radix_sort_pairs(identifiers, lengths, 2)
except RuntimeError as error:
    print("sort:", str(error).split(",")[0])
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py" 2>/dev/null)
expected='first column: sum 303, expected 10; inner product 50005, expected 30
its copy: sum 10, expected 10; inner product 30, expected 30
every second row: sum 303, expected 404; inner product 50005, expected 100010
with an axis: 10.0 30.0
runs of 7 7 7 8 are (7, 1) (1, 1) (7, 1) (2, 1)
scan: 7 14 21 29
sort: radix_sort_pairs() requires a contiguous keys array'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
