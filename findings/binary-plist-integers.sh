#!/usr/bin/env bash
# @plist/binary.parse 1.1.0 (https://www.npmjs.com/package/@plist/binary.parse) reads 255 from a binary property list as -1, and bplist 0.0.4
# (https://www.npmjs.com/package/bplist) reads 2^32 as 0, without an error.
#
# An integer of a binary property list that has 1, 2 or 4 bytes is unsigned, and one of 8 bytes is signed: so Apple's CFBinaryPList.c and Python's plistlib
# read them. The first reader takes all sizes as signed (lib/cjs/index.js, from line 44), so each number in the upper half of a size is negative. The
# second one shifts a number of 32 bits, so it keeps the lowest 32 bits as a signed number: 80 GiB are 0.
#
# The writers have other faults. @plist/binary.serialize 1.1.0 writes 1e300 as 0, and the BigInt -2^40 as 280375465082880. bplist writes 2^32 and -2^40
# as other numbers.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20 and Python 3.11: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, the npm registry, and Python 3.8 or later.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" @plist/binary.parse@1.1.0 @plist/binary.serialize@1.1.0 bplist@0.0.4
cat >"$folder/write.py" <<'PYTHON'
import plistlib
import sys

numbers = [127, 128, 255, 32768, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 80 << 30, -1, -(80 << 30)]
with open(sys.argv[1], "wb") as file:
    plistlib.dump(numbers, file, fmt=plistlib.FMT_BINARY)
PYTHON
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const fs = require("fs");
const bplist = require("bplist");
const plist = require("@plist/binary.parse");
const { serialize } = require("@plist/binary.serialize");

const [folder] = process.argv.slice(2);
const bytes = fs.readFileSync(`${folder}/numbers.plist`);
const buffer = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
console.log(`@plist/binary.parse: ${plist.parse(buffer).join(" ")}`);
bplist.parseBuffer(bytes, (error, [numbers]) => console.log(`bplist: ${numbers.join(" ")}`));
const written = [1e-300, 1e300, 2n ** 40n, -(2n ** 40n)];
fs.writeFileSync(`${folder}/plist`, Buffer.from(serialize(written)));
fs.writeFileSync(`${folder}/bplist`, bplist.create([2 ** 31 - 1, 2 ** 32, -1, -(2 ** 40)]));
JAVASCRIPT
cat >"$folder/read.py" <<'PYTHON'
import plistlib
import sys

for path in sys.argv[1:]:
    with open(path, "rb") as file:
        print(*plistlib.load(file))
PYTHON
cat >"$folder/all.sh" <<'BASH'
cd "$1"
python3 write.py numbers.plist
echo "plistlib: $(python3 read.py numbers.plist)"
node program.cjs "$1"
echo "1e-300, 1e300, 2^40, -2^40 of @plist/binary.serialize: $(python3 read.py plist)"
echo "2^31 - 1, 2^32, -1, -2^40 of bplist: $(python3 read.py bplist)"
BASH
seen=$(bash "$folder/all.sh" "$folder")
expected='plistlib: 127 128 255 32768 65535 2147483647 2147483648 4294967295 4294967296 85899345920 -1 -85899345920
@plist/binary.parse: 127 -128 -1 -32768 -1 2147483647 -2147483648 -1 4294967296 85899345920 -1 -85899345920
bplist: 127 128 255 32768 65535 2147483647 -2147483648 -1 0 0 -1 0
1e-300, 1e300, 2^40, -2^40 of @plist/binary.serialize: 1e-300 0 1099511627776 280375465082880
2^31 - 1, 2^32, -1, -2^40 of bplist: 2147483647 1441151880758558719 -1 0'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
