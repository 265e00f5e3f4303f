#!/usr/bin/env bash
# tiff 7.1.3 (https://www.npmjs.com/package/tiff) reads -20 from a TIFF file of signed integers as 65516, and -20 from one of half-precision floats
# as 52480, without an error.
#
# The field SampleFormat of TIFF 6.0 (page 80 of https://www.itu.int/itudoc/itu-t/com16/tiff-fx/docs/tiff6.pdf) has the type of the samples. The decoder
# reads the field, and refuses types that it does not know, but reads all samples of 8 and 16 bits as unsigned integers (lib/tiff_decoder.js, line 228). Elevations
# below the sea and temperatures below zero are usually such samples.
#
# Seen on 1 December 2026 on x86-64 Linux, with tifffile 2026.3.3 and Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, the npm registry, python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" tiff@7.1.3
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tifffile==2026.3.3 numpy==2.4.6
cat >"$folder/write.py" <<'PYTHON'
import sys

import numpy
import tifffile

TYPES = ["uint8", "int8", "uint16", "int16", "float16", "float32", "float64", "int32"]
for name in TYPES:
    values = numpy.array([[-20, -1, 0], [1, 100, 120]])
    if name.startswith("u"):
        values = abs(values)
    tifffile.imwrite(f"{sys.argv[1]}/{name}.tif", values.astype(name), photometric="minisblack")
    print(name, *(f"{value:g}" for value in tifffile.imread(f"{sys.argv[1]}/{name}.tif").flatten()))
PYTHON
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import fs from "fs";
import { decode } from "tiff";

for (const line of fs.readFileSync(0, "utf8").trim().split("\n")) {
  const [type] = line.split(" ");
  let result;
  try {
    const [image] = decode(fs.readFileSync(`${process.argv[2]}/${type}.tif`));
    result = `sample format ${image.sampleFormat}, ${Array.from(image.data).join(" ")}`;
  } catch (error) {
    result = error.message;
  }
  console.log(`${line}; tiff: ${result}`);
}
JAVASCRIPT
seen=$("$folder/venv/bin/python" "$folder/write.py" "$folder" | node "$folder/program.mjs" "$folder")
expected='uint8 20 1 0 1 100 120; tiff: sample format 1, 20 1 0 1 100 120
int8 -20 -1 0 1 100 120; tiff: sample format 2, 236 255 0 1 100 120
uint16 20 1 0 1 100 120; tiff: sample format 1, 20 1 0 1 100 120
int16 -20 -1 0 1 100 120; tiff: sample format 2, 65516 65535 0 1 100 120
float16 -20 -1 0 1 100 120; tiff: sample format 3, 52480 48128 0 15360 22080 22400
float32 -20 -1 0 1 100 120; tiff: sample format 3, -20 -1 0 1 100 120
float64 -20 -1 0 1 100 120; tiff: sample format 3, -20 -1 0 1 100 120
int32 -20 -1 0 1 100 120; tiff: Unsupported bitDepth: 32'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
