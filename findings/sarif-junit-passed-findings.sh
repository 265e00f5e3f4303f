#!/usr/bin/env bash
# sarif-junit 1.1.4 (https://www.npmjs.com/package/sarif-junit) turns each result of a SARIF file that has no level into a passed test, without an
# error. So a job whose analysis found an error shows no failure.
#
# The level is optional. Without it, a result has the level that its rule has by default, and "warning" if there is none (section 3.27.10 of
# https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html). The converter reads only the level of the result (lib/parser.js), and calls
# all but "error" and "warning" passed.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" sarif-junit@1.1.4
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import { readFileSync, writeFileSync } from "node:fs";
import convert from "sarif-junit";

const rules = [{ id: "race", defaultConfiguration: { level: "error" } }, { id: "leak" }, { id: "style", defaultConfiguration: { level: "note" } }];
const locations = [{ physicalLocation: { artifactLocation: { uri: "main.c" }, region: { startLine: 1 } } }];
const results = [["race", "error"], ["race"], ["leak"], ["style"]].map(([ruleId, level]) => {
  return { ruleId, message: { text: `${ruleId}, level ${level}` }, locations, level };
});
const run = { tool: { driver: { name: "Analyzer", rules } }, results };
const [input, output] = ["results.sarif", "results.xml"].map((name) => `${process.argv[2]}/${name}`);
// JSON has no properties that are undefined.
writeFileSync(input, JSON.stringify({ version: "2.1.0", runs: [run] }));
const { error } = convert({ _: [input, output] });
if (error) throw new Error(error);
const report = readFileSync(output, "utf8");
const cases = report.split("<testcase").slice(1);
results.forEach(({ ruleId, message, level }, index) => {
  const expected = level ?? rules.find(({ id }) => id === ruleId).defaultConfiguration?.level ?? "warning";
  console.log(`${message.text}: is ${expected}, sarif-junit ${cases[index].includes("<failure") ? "failed" : "passed"}`);
});
console.log("sarif-junit:", report.match(/<testsuites [^>]*>/)[0]);
JAVASCRIPT
seen=$(node "$folder/program.mjs" "$folder")
expected='race, level error: is error, sarif-junit failed
race, level undefined: is error, sarif-junit passed
leak, level undefined: is warning, sarif-junit passed
style, level undefined: is note, sarif-junit passed
sarif-junit: <testsuites tests="4" failures="1" errors="0" skipped="0">'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
