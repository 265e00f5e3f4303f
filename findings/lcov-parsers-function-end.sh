#!/usr/bin/env bash
# lcov-parse 1.0.0 (https://www.npmjs.com/package/lcov-parse) and parse-lcov 1.0.4 (https://www.npmjs.com/package/parse-lcov) return the last line of a
# function as its name, and no calls, without an error.
#
# LCOV has FN records with the first line, optionally the last line, and the name, since version 2.0 (man page of geninfo,
# https://github.com/linux-test-project/lcov/blob/master/man/geninfo.1). geninfo writes the last line with GCC 9 and later, and coverage.py 7.17.5
# always. The parsers take the second field as the name (lcov-parse: lib/index.js, line 49). The FNDA record with the calls then has no function.
# @friedemannsommer/lcov-parser 5.0.2 reads both forms.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, Node.js 20 or later with npm, PyPI, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check coverage==7.17.5
npm install --silent --no-audit --no-fund --prefix "$folder" lcov-parse@1.0.0 parse-lcov@1.0.4 @friedemannsommer/lcov-parser@5.0.2
cat >"$folder/training.py" <<'PYTHON'
def train(steps):
    return sum(range(steps))


def resume(path):
    return path.upper()


train(3)
PYTHON
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import { lcovParser } from "@friedemannsommer/lcov-parser";
import lcovParse from "lcov-parse";
import parseLcov from "parse-lcov";

const withEnds = await (await import("node:fs/promises")).readFile("with-ends.info", "utf8");
const parsers = {
  "lcov-parse": (text) => new Promise((resolve) => lcovParse(text, (error, files) => resolve(files))),
  "parse-lcov": (text) => parseLcov.default(text),
  "@friedemannsommer/lcov-parser": (text) => lcovParser({ from: text }),
};
const withoutEnds = withEnds.replace(/^FN:(\d+),\d+,/gm, "FN:$1,");
for (const [title, text] of Object.entries({ "without last lines": withoutEnds, "with last lines": withEnds })) {
  console.log(`${title}: ${text.match(/^FN(DA)?:.*$/gm).join(" ")}`);
  for (const [name, parse] of Object.entries(parsers)) {
    const functions = (await parse(text))[0].functions.details;
    console.log(`  ${name}: ${functions.map((entry) => `${entry.name} with ${entry.hit} calls`).join(", ")}`);
  }
}
JAVASCRIPT
cd "$folder"
venv/bin/coverage run training.py
venv/bin/coverage lcov -q -o with-ends.info
seen=$(node program.mjs)
expected='without last lines: FN:1,train FNDA:1,train FN:5,resume FNDA:0,resume
  lcov-parse: train with 1 calls, resume with 0 calls
  parse-lcov: train with 1 calls, resume with 0 calls
  @friedemannsommer/lcov-parser: train with 1 calls, resume with 0 calls
with last lines: FN:1,2,train FNDA:1,train FN:5,6,resume FNDA:0,resume
  lcov-parse: 2 with undefined calls, 6 with undefined calls
  parse-lcov: 2 with undefined calls, 6 with undefined calls
  @friedemannsommer/lcov-parser: train with 1 calls, resume with 0 calls'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
