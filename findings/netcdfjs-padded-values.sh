#!/usr/bin/env bash
# netcdfjs 4.0.0 (https://www.npmjs.com/package/netcdfjs) returns padding as values, and -1 as 255, without an error: six bytes are eight
# numbers, and each record of one short has two.
#
# The classic format of netCDF fills the data of a variable, or of a record, up to 4 B, and its `vsize` includes these bytes. The library takes
# `vsize` as the amount of data (src/data.ts), and the shape of the variable has no part in it. Integers of 32 bits need no padding, and are right.
# NC_BYTE is a signed type (https://docs.unidata.ucar.edu/netcdf-c/current/file_format_specifications.html).
#
# Seen on 1 December 2026 on x86-64 Linux, with netCDF4 1.7.5.1.post1 and Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, Node.js 18 or later with npm, PyPI and the npm
# registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check netCDF4==1.7.5.1.post1 numpy==2.4.6 scipy==1.17.1
npm install --silent --no-audit --no-fund --prefix "$folder" netcdfjs@4.0.0
cat >"$folder/program.py" <<'PYTHON'
import sys

import netCDF4
import scipy.io

values = [1, 2, 3, 4, 5, -1]
variables = [("bytes", "i1", "x"), ("shorts", "i2", "time"), ("ints", "i4", "time")]
with netCDF4.Dataset(sys.argv[1], "w", format="NETCDF3_CLASSIC") as file:
    file.createDimension("time", None)
    file.createDimension("x", 6)
    for name, kind, dimension in variables:
        file.createVariable(name, kind, (dimension,))[:] = values
# A second reader, which shares no code with the writer.
with scipy.io.netcdf_file(sys.argv[1], mmap=False) as file:
    for name, _, _ in variables:
        print(f"SciPy, {name}:", *file.variables[name][:])
PYTHON
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import { readFileSync } from "node:fs";
import { NetCDFReader } from "netcdfjs";

// Padding may have any value, so only its amount is printed.
const reader = new NetCDFReader(new Uint8Array(readFileSync(process.argv[2])).buffer);
for (const name of ["bytes", "shorts", "ints"]) {
  const rows = reader.getDataVariable(name).map((row) => [row].flat());
  const first = rows.slice(0, 6).map((row) => row[0]);
  console.log(`netcdfjs, ${name}: ${first.join(" ")}; rows ${rows.length}, numbers ${rows.flat().length}`);
}
JAVASCRIPT
seen=$(
    "$folder/venv/bin/python" "$folder/program.py" "$folder/file.nc"
    node "$folder/program.mjs" "$folder/file.nc"
)
expected='SciPy, bytes: 1 2 3 4 5 -1
SciPy, shorts: 1 2 3 4 5 -1
SciPy, ints: 1 2 3 4 5 -1
netcdfjs, bytes: 1 2 3 4 5 255; rows 8, numbers 8
netcdfjs, shorts: 1 2 3 4 5 -1; rows 6, numbers 12
netcdfjs, ints: 1 2 3 4 5 -1; rows 6, numbers 6'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
