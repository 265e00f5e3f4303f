#!/usr/bin/env bash
# fastparquet 2026.9.0 (https://pypi.org/project/fastparquet) reads wrong integers, without an error, from columns with the encoding
# DELTA_BINARY_PACKED of Parquet, if the differences between neighbours need more than 28 bits.
#
# The encoding stores differences between neighbours, and each group of them has its own number of bits. The reader collects bits in an integer
# of 64 bits. It removes used bits only if it has all bits of the next difference. So from 29 bits on, it shifts new bytes beyond the 64th bit
# (fastparquet/cencoding.pyx, lines 223 to 229). Bytes of memory that rise and fall by 128 MiB need 29 bits; one byte less needs 28. Values are
# sums of differences, so all rows of a page are wrong after the first wrong difference.
#
# In data pages of version 2, all integers of 64 bits are wrong. The reader writes 32-bit values into the column of 64-bit values
# (fastparquet/core.py, lines 422 and 429), so each value consists of two. pyarrow reads these files correctly.
#
# Seen on 30 November 2026 on x86-64 Linux, also with fastparquet 2024.5.0: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check fastparquet==2026.9.0 pyarrow==26.0.1 numpy==2.4.6 pandas==3.1.1
cat >"$folder/program.py" <<'PYTHON'
import os
import sys

import fastparquet
import pyarrow
import pyarrow.parquet

MIB = 1 << 20
path = os.path.join(sys.argv[1], "column.parquet")


def read(values, page):
    table = pyarrow.table({"bytes": pyarrow.array(values, pyarrow.int64())})
    pyarrow.parquet.write_table(table, path, use_dictionary=False, column_encoding="DELTA_BINARY_PACKED", data_page_version=page)
    assert pyarrow.parquet.read_table(path)["bytes"].to_pylist() == values
    return fastparquet.ParquetFile(path).to_pandas()["bytes"].tolist()


for change in (128 * MIB - 1, 128 * MIB):
    values = [0, change] * 16
    seen = read(values, "1.0")
    print(f"0 and {change} in turns: {'right' if seen == values else 'wrong'}, {seen[4:8]}")
print(f"1 to 32 in a page of version 2: first {read(list(range(1, 33)), '2.0')[:2]}")
print(f"1 and 2 of 32 bits, joined: {1 | 2 << 32}")
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py" "$folder")
expected='0 and 134217727 in turns: right, [0, 134217727, 0, 134217727]
0 and 134217728 in turns: wrong, [0, -134217728, -268435456, -134217728]
1 to 32 in a page of version 2: first [8589934593, 17179869187]
1 and 2 of 32 bits, joined: 8589934593'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
