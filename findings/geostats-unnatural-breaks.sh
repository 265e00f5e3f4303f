#!/usr/bin/env bash
# geostats 2.1.0 (https://www.npmjs.com/package/geostats) finds other natural breaks than the best ones, without an error: it puts 9, 10 and 100 into one
# class, and 5 into another.
#
# Natural breaks of Jenks are the classes with the least sum of squared deviations from their means
# (https://doi.org/10.1080/01621459.1958.10501479). The program tries all classes. The sum of the classes of `getClassJenks` (lib/geostats.js, line 983)
# is up to 784 times the least one. `getClassJenks2` returns the best upper limits, but 0 as the lower limit of numbers that start with 1 1.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" geostats@2.1.0
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const geostats = require("geostats");

/** The sum of squared deviations of classes, which end at the given limits. */
function deviation(sorted, limits) {
  let sum = 0;
  for (let index = 1; index < limits.length; index += 1) {
    const members = sorted.filter((value) => value <= limits[index] && (index === 1 || value > limits[index - 1]));
    const mean = members.reduce((total, value) => total + value, 0) / members.length;
    for (const value of members) sum += (value - mean) ** 2;
  }
  return sum;
}

/** The limits of three classes with the least sum. */
function best(sorted) {
  const values = [...new Set(sorted)];
  let least = [];
  for (const [index, first] of values.entries()) {
    for (const second of values.slice(index + 1, -1)) {
      const limits = [values[0], first, second, values.at(-1)];
      if (!least.length || deviation(sorted, limits) < deviation(sorted, least)) least = limits;
    }
  }
  return least;
}

for (const values of [
  [1, 2, 3, 10, 11, 12, 20, 21, 22],
  [1, 2, 3, 5, 9, 10, 100],
  [1, 2, 4, 5, 7, 9, 10, 20],
  [1, 1, 1, 50, 51, 52, 100],
]) {
  const print = (limits) => `${limits.join(" ")} (${deviation(values, limits).toFixed(2)})`;
  const breaks = new geostats(values).getClassJenks(3);
  console.log(`${values.join(" ")}: geostats ${print(breaks)}, best ${print(best(values))}, Jenks2 ${new geostats(values).getClassJenks2(3).join(" ")}`);
}
JAVASCRIPT
seen=$(node "$folder/program.cjs")
expected='1 2 3 10 11 12 20 21 22: geostats 1 3 12 22 (6.00), best 1 3 12 22 (6.00), Jenks2 1 3 12 22
1 2 3 5 9 10 100: geostats 1 3 5 100 (5462.67), best 1 5 10 100 (9.25), Jenks2 1 5 10 100
1 2 4 5 7 9 10 20: geostats 1 2 5 20 (102.00), best 1 5 10 20 (14.67), Jenks2 1 5 10 20
1 1 1 50 51 52 100: geostats 1 1 50 100 (1568.67), best 1 1 52 100 (2.00), Jenks2 0 1 52 100'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
