#!/usr/bin/env bash
# mat-for-js 1.1.0 (https://www.npmjs.com/package/mat-for-js) returns wrong numbers from arrays with three dimensions, without an error: some are missing,
# and others are there twice.
#
# A MAT-file has arrays in column-major order: the first index changes fastest ("Array Format" in
# https://www.mathworks.com/help/pdf_doc/matlab/matfile_format.pdf). To find a number, the library multiplies each index by the length of the preceding
# dimension (lib/mat4js.read.js, line 410), and not by those of all preceding ones. Arrays with two dimensions are right. SciPy 1.17.1 writes the file,
# and reads it correctly.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, Node.js 18 or later with npm, PyPI, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scipy==1.17.1 numpy==2.4.6
npm install --silent --no-audit --no-fund --prefix "$folder" mat-for-js@1.1.0
cat >"$folder/write.py" <<'PYTHON'
import sys

import numpy
import scipy.io

shapes = {"rows": (2, 3), "square": (2, 2, 2), "steps": (2, 3, 2), "images": (2, 2, 3)}
arrays = {name: numpy.arange(numpy.prod(shape), dtype=float).reshape(shape) for name, shape in shapes.items()}
scipy.io.savemat(sys.argv[1], arrays)
for name in shapes:
    print(f"SciPy, {name}:", str(scipy.io.loadmat(sys.argv[1])[name].astype(int).tolist()).replace(" ", ""))
PYTHON
cat >"$folder/read.mjs" <<'JAVASCRIPT'
import { readFileSync } from "node:fs";
import * as mat from "mat-for-js";

const bytes = readFileSync(process.argv[2]);
const { data } = mat.read(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
for (const [name, array] of Object.entries(data)) {
  const values = array.flat(Infinity);
  const sum = values.reduce((total, value) => total + value);
  console.log(`mat-for-js, ${name}: ${JSON.stringify(array)}, sum ${sum} instead of ${(values.length * (values.length - 1)) / 2}`);
}
JAVASCRIPT
seen=$("$folder/venv/bin/python" "$folder/write.py" "$folder/arrays.mat" && node "$folder/read.mjs" "$folder/arrays.mat")
expected='SciPy, rows: [[0,1,2],[3,4,5]]
SciPy, square: [[[0,1],[2,3]],[[4,5],[6,7]]]
SciPy, steps: [[[0,1],[2,3],[4,5]],[[6,7],[8,9],[10,11]]]
SciPy, images: [[[0,1,2],[3,4,5]],[[6,7,8],[9,10,11]]]
mat-for-js, rows: [[0,1,2],[3,4,5]], sum 15 instead of 15
mat-for-js, square: [[[0,2],[2,1]],[[4,6],[6,5]]], sum 26 instead of 28
mat-for-js, steps: [[[0,8],[2,10],[4,7]],[[6,4],[8,1],[10,3]]], sum 63 instead of 66
mat-for-js, images: [[[0,3,1],[3,1,4]],[[6,9,7],[9,7,10]]], sum 60 instead of 66'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
