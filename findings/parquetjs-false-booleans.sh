#!/usr/bin/env bash
# @dsnp/parquetjs 1.8.8 (https://www.npmjs.com/package/@dsnp/parquetjs) returns false for each boolean of a Parquet file with data pages of version
# 2, and negative numbers for large unsigned ones, without an error.
#
# Writers of pages of version 2 encode booleans with RLE, in one bit each. The reader decodes RLE with the length of the column's type as the number
# of bits, and a boolean has no length (dist/lib/reader.js, line 927). An issue of January 2024 says that the encoding fails, but not how
# (https://github.com/frequency-chain/parquetjs/issues/113). The reader also ignores that a column is unsigned: 2 GiB in a column of 32 bits are
# -2147483648 bytes.
#
# Seen on 1 December 2026 on x86-64 Linux, with pyarrow 26.0.1 and Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, Node.js 18 or later with npm, PyPI and the npm
# registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyarrow==26.0.1
npm install --silent --no-audit --no-fund --prefix "$folder" @dsnp/parquetjs@1.8.8
cat >"$folder/program.py" <<'PYTHON'
import sys

import pyarrow
from pyarrow import parquet

columns = {
    "failed": [True, False, True, True, False, True, True, True],
    "bytes": pyarrow.array([2**31 - 1, 2**31, 2**32 - 1, 4, 5, 6, 7, 8], pyarrow.uint32()),
}
table = pyarrow.table(columns)
for version in ("1.0", "2.0"):
    path = f"{sys.argv[1]}/{version}.parquet"
    parquet.write_table(table, path, data_page_version=version)
    assert parquet.read_table(path) == table
PYTHON
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import parquet from "@dsnp/parquetjs";

for (const version of ["1.0", "2.0"]) {
  const reader = await parquet.ParquetReader.openFile(`${process.argv[2]}/${version}.parquet`);
  const rows = [];
  for await (const row of reader) rows.push(row);
  console.log(`pages ${version}, failed:`, rows.map((row) => row.failed).join(" "));
  console.log(`pages ${version}, bytes:`, rows.map((row) => row.bytes).join(" "));
  await reader.close();
}
JAVASCRIPT
"$folder/venv/bin/python" "$folder/program.py" "$folder"
seen=$(node "$folder/program.mjs" "$folder")
expected='pages 1.0, failed: true false true true false true true true
pages 1.0, bytes: 2147483647 -2147483648 -1 4 5 6 7 8
pages 2.0, failed: false false false false false false false false
pages 2.0, bytes: 2147483647 -2147483648 -1 4 5 6 7 8'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
