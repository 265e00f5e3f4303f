#!/usr/bin/env bash
# jsfive 0.4.2 (https://www.npmjs.com/package/jsfive) leaves out the fill value of HDF5: 18 of 24 elements with the value 7 are holes in its array,
# without an error. So their sum is 6 instead of 132.
#
# HDF5 stores no chunk that was never written, and its elements have the fill value of the dataset (Fill Value Message in
# https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html). jsfive allocates an array, and writes only the chunks that the file has
# (esm/btree.js). Functions such as `reduce` skip holes. New rows of a dataset that grew are holes too, and a dataset without a chunk is empty.
#
# Seen on 1 December 2026 on x86-64 Linux, with h5py 3.16.0 and Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, Node.js 18 or later with npm, PyPI and the npm
# registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check h5py==3.16.0 numpy==2.4.6
npm install --silent --no-audit --no-fund --prefix "$folder" jsfive@0.4.2 h5wasm@0.10.3
cat >"$folder/program.py" <<'PYTHON'
import sys

import h5py

with h5py.File(sys.argv[1], "w") as file:
    file.create_dataset("part", shape=(4, 6), dtype="i4", chunks=(2, 3), fillvalue=7)[:2, :3] = 1
    file.create_dataset("none", shape=(4,), dtype="f4", chunks=(2,), fillvalue=2.5)
    file.create_dataset("grown", data=[1, 2], dtype="i2", chunks=(2,), maxshape=(None,)).resize((4,))
    file.create_dataset("complete", data=[1, 2, 3, 4], dtype="i4", chunks=(2,), fillvalue=7)
PYTHON
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import { readFileSync } from "node:fs";
import h5wasm from "h5wasm/node";
import { File } from "jsfive";

await h5wasm.ready;
const path = process.argv[2];
const file = new File(new Uint8Array(readFileSync(path)).buffer, path);
const reference = new h5wasm.File(path, "r");
for (const name of ["part", "none", "grown", "complete"]) {
  const results = [reference.get(name).value, file.get(name).value].map((values) => {
    const array = Array.from(values);
    return `sum ${values.reduce((sum, value) => sum + value, 0)}, undefined ${array.filter((value) => value === undefined).length} of ${array.length}`;
  });
  console.log(`${name}: h5wasm ${results[0]}; jsfive ${results[1]}`);
}
JAVASCRIPT
"$folder/venv/bin/python" "$folder/program.py" "$folder/file.h5"
seen=$(node "$folder/program.mjs" "$folder/file.h5")
expected='part: h5wasm sum 132, undefined 0 of 24; jsfive sum 6, undefined 18 of 24
none: h5wasm sum 10, undefined 0 of 4; jsfive sum 0, undefined 0 of 0
grown: h5wasm sum 3, undefined 0 of 4; jsfive sum 3, undefined 2 of 4
complete: h5wasm sum 10, undefined 0 of 4; jsfive sum 10, undefined 0 of 4'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
