#!/usr/bin/env bash
# junit-report-merger 9.0.4 (https://www.npmjs.com/package/junit-report-merger) adds the times of suites with `sumTime`, but not of suites with the
# same name: four parts of a suite that take 40 s each have 40 s.
#
# By its documentation, the option sums the times of all suites, without regard to those that ran in parallel. Suites with the same name, as parts of
# one run have them, become one suite. It has the longest of their times and the sum of their tests (src/mergeToString.js reads `sumTime` only for
# the total). Suites with different names have the right total.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" junit-report-merger@9.0.4
cat >"$folder/program.mjs" <<'JAVASCRIPT'
import merger from "junit-report-merger";

for (const [title, name] of [["four names", (part) => `gpu ${part}`], ["one name", () => "gpu"]]) {
  const reports = [1, 2, 3, 4].map((part) => {
    const test = `<testcase classname="gpu" name="test ${part}" time="40"/>`;
    return `<testsuites><testsuite name="${name(part)}" tests="1" failures="0" time="40">${test}</testsuite></testsuites>`;
  });
  const merged = await merger.mergeToString(reports, { sumTime: true });
  const times = [...merged.matchAll(/<testcase [^>]*time="(\d+)"/g)].map((match) => Number(match[1]));
  console.log(`${title}: times of tests ${times.join(" + ")} = ${times.reduce((sum, time) => sum + time)}`);
  merged.match(/<testsuites? [^>]*>/g).forEach((line) => console.log(`  ${line}`));
}
JAVASCRIPT
seen=$(node "$folder/program.mjs")
expected='four names: times of tests 40 + 40 + 40 + 40 = 160
  <testsuites tests="4" failures="0" time="160">
  <testsuite name="gpu 1" tests="1" failures="0" time="40">
  <testsuite name="gpu 2" tests="1" failures="0" time="40">
  <testsuite name="gpu 3" tests="1" failures="0" time="40">
  <testsuite name="gpu 4" tests="1" failures="0" time="40">
one name: times of tests 40 + 40 + 40 + 40 = 160
  <testsuites tests="4" failures="0" time="40">
  <testsuite name="gpu" tests="4" failures="0" time="40">'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
