#!/usr/bin/env bash
# The Blackman-Nuttall window of fft-windowing 0.1.4 (https://www.npmjs.com/package/fft-windowing) rises at its ends, and its Lanczos window makes the
# middle sample of an odd number NaN, without an error.
#
# A window is near 0 at its ends, so that a spectrum has few false frequencies. The second coefficient of this one is 0.4891775
# (https://doi.org/10.1109/TASSP.1981.1163506). The library repeats the first one, 0.3635819 (windowing.js,
# line 66). So the ends are 0.126 instead of 0.0004, and a quarter of a tone leaks into other frequencies. The Lanczos window divides the sine of 0 by 0,
# where the value is 1, so the whole spectrum is NaN. The other windows are right. SciPy 1.17.1 computes the expected ones.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, the npm registry, python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" fft-windowing@0.1.4
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check scipy==1.17.1
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const windowing = require("fft-windowing");

for (const name of ["hann", "blackman_harris", "blackman_nuttall", "lanczos"]) {
  for (const points of [7, 8, 1024]) console.log(JSON.stringify([name, windowing[name](new Array(points).fill(1))]));
}
JAVASCRIPT
cat >"$folder/program.py" <<'PYTHON'
import json
import sys

import numpy
import scipy.signal.windows

names = {"blackman_harris": "blackmanharris", "blackman_nuttall": "nuttall"}


def show(values):
    return " ".join(f"{0.0 if abs(value) < 5e-5 else value:.4f}" for value in values)


def lobe(window):
    """The highest level outside of the main lobe, which is eight frequencies wide, in decibels."""
    spectrum = numpy.abs(numpy.fft.fft(window, 16 * len(window)))
    return 20 * numpy.log10(spectrum[64:-64].max() / spectrum[0])


for line in sys.stdin:
    name, window = json.loads(line)
    window = [float("nan") if value is None else value for value in window]
    expected = scipy.signal.windows.get_window(names.get(name, name), len(window), fftbins=False)
    if len(window) < 1024:
        print(f"{name}: {show(window)}, expected {show(expected)}")
    elif name.startswith("blackman"):
        print(f"{name}: highest false frequency {lobe(window):.0f} dB, expected {lobe(expected):.0f} dB")
PYTHON
seen=$(node "$folder/program.cjs" | "$folder/venv/bin/python" "$folder/program.py")
expected='hann: 0.0000 0.2500 0.7500 1.0000 0.7500 0.2500 0.0000, expected 0.0000 0.2500 0.7500 1.0000 0.7500 0.2500 0.0000
hann: 0.0000 0.1883 0.6113 0.9505 0.9505 0.6113 0.1883 0.0000, expected 0.0000 0.1883 0.6113 0.9505 0.9505 0.6113 0.1883 0.0000
blackman_harris: 0.0001 0.0556 0.5206 1.0000 0.5206 0.0556 0.0001, expected 0.0001 0.0556 0.5206 1.0000 0.5206 0.0556 0.0001
blackman_harris: 0.0001 0.0334 0.3328 0.8894 0.8894 0.3328 0.0334 0.0001, expected 0.0001 0.0334 0.3328 0.8894 0.8894 0.3328 0.0334 0.0001
blackman_harris: highest false frequency -92 dB, expected -92 dB
blackman_nuttall: 0.1260 0.1241 0.4664 0.8744 0.4664 0.1241 0.1260, expected 0.0004 0.0613 0.5292 1.0000 0.5292 0.0613 0.0004
blackman_nuttall: 0.1260 0.1161 0.3148 0.7787 0.7787 0.3148 0.1161 0.1260, expected 0.0004 0.0378 0.3427 0.8919 0.8919 0.3427 0.0378 0.0004
blackman_nuttall: highest false frequency -32 dB, expected -98 dB
lanczos: 0.0000 0.4135 0.8270 nan 0.8270 0.4135 0.0000, expected 0.0000 0.4135 0.8270 1.0000 0.8270 0.4135 0.0000
lanczos: 0.0000 0.3484 0.7241 0.9668 0.9668 0.7241 0.3484 0.0000, expected 0.0000 0.3484 0.7241 0.9668 0.9668 0.7241 0.3484 0.0000'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
