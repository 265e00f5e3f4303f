#!/usr/bin/env bash
# dbf-reader 1.0.3 (https://www.npmjs.com/package/dbf-reader) reads each date of a dBASE file as one of the next month, and an empty number as 0, without
# an error: 31 January becomes 3 March.
#
# A field of type D has the year, the month from 01 to 12 and the day as digits
# (https://www.loc.gov/preservation/digital/formats/fdd/fdd000325.shtml). The reader passes the month to the constructor of Date, whose months start at 0
# (dbf-reader.js, line 41). 31 January is 31 "February", which is 3 March. A number of spaces is a missing one, and a logical value of a space or `?`
# is not set; the reader returns 0 and false.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20 and files of dbffile 1.13.0: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, and the npm registry.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" dbf-reader@1.0.3 dbffile@1.13.0
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const fs = require("fs");
const { Dbf } = require("dbf-reader");
const { DBFFile } = require("dbffile");

async function main(path) {
  const file = await DBFFile.create(path, [
    { name: "day", type: "D", size: 8 },
    { name: "mib", type: "N", size: 12, decimalPlaces: 2 },
    { name: "failed", type: "L", size: 1 },
  ]);
  const day = (text) => new Date(`${text}T00:00:00Z`);
  await file.appendRecords([
    { day: day("2026-01-31"), mib: 12.5, failed: true },
    { day: day("2026-06-15"), mib: -0.25, failed: false },
    { day: day("2026-12-31"), mib: null, failed: null },
  ]);
  const rows = Dbf.read(fs.readFileSync(path)).rows;
  const print = ({ day, mib, failed }) => `${day.toISOString().slice(0, 10)} ${mib} ${failed}`;
  for (const [index, record] of (await (await DBFFile.open(path)).readRecords()).entries()) {
    console.log(`dbffile: ${print(record)}; dbf-reader: ${print(rows[index])}`);
  }
  console.log(`fields: ${fs.readFileSync(path, "latin1").slice(32 * 4 + 1).replaceAll("\x1a", "")}`);
}

main(process.argv[2]);
JAVASCRIPT
seen=$(TZ=UTC node "$folder/program.cjs" "$folder/table.dbf")
expected='dbffile: 2026-01-31 12.5 true; dbf-reader: 2026-03-03 12.5 true
dbffile: 2026-06-15 -0.25 false; dbf-reader: 2026-07-15 -0.25 false
dbffile: 2026-12-31 null null; dbf-reader: 2027-01-31 0 false
fields:  20260131        12.5T 20260615       -0.25F 20261231             '
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
