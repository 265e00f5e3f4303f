#!/usr/bin/env bash
# nanoarrow 0.9.0 (https://pypi.org/project/nanoarrow) reads each negative decimal number as a large positive one, without an error.
#
# Arrow stores decimals as signed integers of 128 or 256 bits. `to_pylist` and other conversions to Python read them as unsigned
# (nanoarrow/iterator.py, line 420), so -0.01 becomes 2^128 - 1 hundredths. The result is then rounded to the digits of the
# type, so different negative numbers become equal.
#
# Seen on 30 November 2026 on x86-64 Linux, with pyarrow 26.0.1: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nanoarrow==0.9.0 pyarrow==26.0.1
cat >"$folder/program.py" <<'PYTHON'
import decimal

import nanoarrow
import pyarrow

values = [decimal.Decimal(text) for text in ("1.23", "-0.01", "-99.99")]
for kind in (pyarrow.decimal128(10, 2), pyarrow.decimal256(40, 2)):
    array = pyarrow.array(values, kind)
    print(kind, *array.to_pylist())
    print("nanoarrow:", *nanoarrow.Array(array).to_pylist())
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py")
expected='decimal128(10, 2) 1.23 -0.01 -99.99
nanoarrow: 1.23 3.402823669E+36 3.402823669E+36
decimal256(40, 2) 1.23 -0.01 -99.99
nanoarrow: 1.23 1.157920892373161954235709850086879078533E+75 1.157920892373161954235709850086879078533E+75'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
