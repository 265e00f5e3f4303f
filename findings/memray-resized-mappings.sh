#!/usr/bin/env bash
# memray 1.20.0 (https://pypi.org/project/memray) does not record that a memory mapping grows or shrinks.
#
# memray records `mmap` and `munmap`, but not `mremap`, which `mmap.mmap.resize` of Python calls. A mapping that grew from 64 MiB to 512 MiB is 64
# MiB in the peak. If a mapping shrinks, the part that is gone counts as allocated, even after `close`, so it seems leaked. If `mremap` moves a
# mapping, its old address does too.
#
# Seen on 1 December 2026 on x86-64 Linux: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check memray==1.20.0
cat >"$folder/program.py" <<'PYTHON'
import mmap
import sys

import memray

MIB = 1 << 20
for first, last in ((64, 64), (64, 512), (64, 8)):
    path = f"{sys.argv[1]}/{last}.bin"
    with memray.Tracker(path):
        mapping = mmap.mmap(-1, first * MIB)
        mapping.resize(last * MIB)
        if last <= first:
            mapping.close()
    recording = memray.FileReader(path)
    left = sum(record.size for record in recording.get_leaked_allocation_records())
    state = "kept" if last > first else "closed"
    print(f"{first} MiB, then {last} MiB, {state}: peak {recording.metadata.peak_memory // MIB} MiB, left {left // MIB} MiB")
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py" "$folder")
expected='64 MiB, then 64 MiB, closed: peak 64 MiB, left 0 MiB
64 MiB, then 512 MiB, kept: peak 64 MiB, left 64 MiB
64 MiB, then 8 MiB, closed: peak 64 MiB, left 56 MiB'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
