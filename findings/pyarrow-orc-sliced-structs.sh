#!/usr/bin/env bash
# pyarrow 26.0.1 (https://pypi.org/project/pyarrow) writes other rows to an ORC file than it was given, without an error, if the table is a part of another one
# and has a column of structs with a missing struct.
#
# A part of a table shares the buffers of the whole table and has an offset. The ORC writer ignores the offset for such a column: it
# writes the first structs of the whole table, as many as the part has. Other columns are right, so a row of the file has values of two
# rows. The column is right if the part has no missing struct. The Parquet writer of pyarrow writes the right rows.
#
# Seen on 30 November 2026 on x86-64 Linux: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyarrow==26.0.1
cat >"$folder/program.py" <<'PYTHON'
import io

import pyarrow
import pyarrow.orc
import pyarrow.parquet


def read(module, table):
    file = io.BytesIO()
    module.write_table(table, file)
    return module.read_table(io.BytesIO(file.getvalue())).to_pylist()


def show(rows):
    return " ".join(f"{row['step']}:{row['memory']['bytes'] if row['memory'] else None}" for row in rows)


def tables(memory):
    return pyarrow.table({"step": range(1, 6), "memory": memory}).slice(2)


for name, missing in (("a struct is missing", None), ("no struct is missing", {"bytes": 40})):
    part = tables([{"bytes": 10}, {"bytes": 20}, {"bytes": 30}, missing, {"bytes": 50}])
    print(f"{name}: given {show(part.to_pylist())}, ORC {show(read(pyarrow.orc, part))}, Parquet {show(read(pyarrow.parquet, part))}")
part = tables([{"bytes": 10}, None, {"bytes": 30}, {"bytes": 40}, {"bytes": 50}])
print(f"missing before the part: given {show(part.to_pylist())}, ORC {show(read(pyarrow.orc, part))}")
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py")
expected='a struct is missing: given 3:30 4:None 5:50, ORC 3:10 4:20 5:30, Parquet 3:30 4:None 5:50
no struct is missing: given 3:30 4:40 5:50, ORC 3:30 4:40 5:50, Parquet 3:30 4:40 5:50
missing before the part: given 3:30 4:40 5:50, ORC 3:30 4:40 5:50'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
