#!/usr/bin/env bash
# polygon-centroid 1.1.0 (https://www.npmjs.com/package/polygon-centroid) returns the mean of the corners as the centroid of a polygon, without an error. So
# the centroid of a rectangle moves if a point is added on one of its sides.
#
# The centroid of a polygon is that of its area (https://en.wikipedia.org/wiki/Centroid#Of_a_polygon), and the documentation promises it for convex
# polygons. The mean of the corners is the same for triangles and rectangles, but not for a trapezoid. A comment in the source calls the result
# approximate (index.js, line 4); the documentation does not. Shapely 2.1.2 computes the expected points.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, the npm registry, python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" polygon-centroid@1.1.0
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check shapely==2.1.2
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const centroid = require("polygon-centroid");

for (const polygon of [
  [[0, 0], [4, 0], [4, 2], [0, 2]],
  [[0, 0], [6, 0], [0, 3]],
  [[0, 0], [1, 0], [2, 0], [3, 0], [4, 0], [4, 2], [0, 2]],
  [[0, 0], [10, 0], [6, 2], [4, 2]],
  [[0, 0], [8, 0], [8, 4], [7, 5], [0, 5]],
]) {
  const { x, y } = centroid(polygon.map(([x, y]) => ({ x, y })));
  console.log(JSON.stringify([polygon, x, y]));
}
JAVASCRIPT
cat >"$folder/program.py" <<'PYTHON'
import json
import sys

from shapely import Polygon

for line in sys.stdin:
    points, x, y = json.loads(line)
    polygon = Polygon(points)
    assert polygon.convex_hull.area == polygon.area
    print(f"{points}: polygon-centroid {x:.3f} {y:.3f}, expected {polygon.centroid.x:.3f} {polygon.centroid.y:.3f}")
PYTHON
seen=$(node "$folder/program.cjs" | "$folder/venv/bin/python" "$folder/program.py")
expected='[[0, 0], [4, 0], [4, 2], [0, 2]]: polygon-centroid 2.000 1.000, expected 2.000 1.000
[[0, 0], [6, 0], [0, 3]]: polygon-centroid 2.000 1.000, expected 2.000 1.000
[[0, 0], [1, 0], [2, 0], [3, 0], [4, 0], [4, 2], [0, 2]]: polygon-centroid 2.000 0.571, expected 2.000 1.000
[[0, 0], [10, 0], [6, 2], [4, 2]]: polygon-centroid 5.000 1.000, expected 5.000 0.778
[[0, 0], [8, 0], [8, 4], [7, 5], [0, 5]]: polygon-centroid 4.600 2.800, expected 3.954 2.473'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
