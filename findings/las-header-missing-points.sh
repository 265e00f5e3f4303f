#!/usr/bin/env bash
# las-header 0.0.4 (https://www.npmjs.com/package/las-header) returns 0 points for a LAS file of version 1.4 that has 1000, and no coordinate system for
# most files, without an error.
#
# LAS 1.4 has the number of points in 64 bits at the end of its header. The former field of 32 bits is 0 for the point formats from 6 on, which 1.4 added
# (section 2.4 of https://www.asprs.org/wp-content/uploads/2019/07/LAS_1_4_r15.pdf). The library reads only the former field. It expects the records with the
# coordinate system after 227 bytes (src/utils/headerBlock.js), but the header of 1.3 has 235 bytes and the one of 1.4 has 375. It also takes the data of
# a record for the next record, so the coordinate system must be in the first one. laspy 2.7.0 writes the files, and reads them.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, the npm registry, python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" las-header@0.0.4
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check laspy==2.7.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import struct
import sys

import laspy
import numpy

# The keys of a coordinate system: one key, ProjectedCRSGeoKey, is the EPSG code 25832.
keys = struct.pack("<8H", 1, 1, 0, 1, 3072, 0, 1, 25832)
for name, version, point_format, records in [
    ("1.2", "1.2", 3, 1),
    ("1.2 with another record first", "1.2", 3, 2),
    ("1.3", "1.3", 3, 1),
    ("1.4", "1.4", 6, 1),
]:
    header = laspy.LasHeader(version=version, point_format=point_format)
    header.scales = [0.001] * 3
    if records == 2:
        header.vlrs.append(laspy.VLR("Example", 1, "an example", b"12345678"))
    header.vlrs.append(laspy.VLR("LASF_Projection", 34735, "", keys))
    data = laspy.LasData(header)
    data.x = data.y = data.z = numpy.arange(1000.0)
    path = f"{sys.argv[1]}/{name}.las"
    data.write(path)
    header = laspy.open(path).header
    [found] = header.vlrs.get("GeoKeyDirectoryVlr")
    print(f"{name}, laspy: {header.point_count} points, EPSG {found.geo_keys[0].value_offset}")
PYTHON
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const library = require("las-header");

for (const name of ["1.2", "1.2 with another record first", "1.3", "1.4"]) {
  const header = library.readLocalFile({ input: `${__dirname}/${name}.las` });
  console.log(`${name}, las-header: ${header.NumberOfPoints} points, EPSG ${header.epsg}`);
}
JAVASCRIPT
seen=$("$folder/venv/bin/python" "$folder/program.py" "$folder"; node "$folder/program.cjs")
expected='1.2, laspy: 1000 points, EPSG 25832
1.2 with another record first, laspy: 1000 points, EPSG 25832
1.3, laspy: 1000 points, EPSG 25832
1.4, laspy: 1000 points, EPSG 25832
1.2, las-header: 1000 points, EPSG 25832
1.2 with another record first, las-header: 1000 points, EPSG undefined
1.3, las-header: 1000 points, EPSG undefined
1.4, las-header: 0 points, EPSG undefined'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
