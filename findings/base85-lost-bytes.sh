#!/usr/bin/env bash
# base85 3.2.0 (https://www.npmjs.com/package/base85) writes two zero bytes as no characters at all, and `abcd` with a zero byte as `ab`, without an error.
#
# Ascii85 writes four bytes as five characters, and four zero bytes as z. A last group of one to three bytes is filled up with zeros, and the
# characters for them are cut; it is never a z (ASCII85Encode Filter in the PostScript Language Reference,
# https://www.adobe.com/jp/print/postscript/pdfs/PLRM.pdf). The library writes z first and then cuts (lib/base85.js, line 135), so it cuts characters of
# the preceding group. Its reader replaces only the first z (line 223), so it loses or adds bytes if there are two. With the encoding Z85, both are right.
# The module base64 of Python computes the expected text.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, the npm registry, and python3.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" base85@3.2.0
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const base85 = require("base85");

const cases = ["6162636465", "0001", "0000", "6162636400", "616263640000", "6162636400000000", "0000000000000000", "000000000000000061626364",
  "00000000616263640000000061626364"];
for (const hex of cases) {
  const text = base85.encode(Buffer.from(hex, "hex"), "ascii85");
  console.log(hex, text, base85.decode(text, "ascii85").toString("hex"));
}
JAVASCRIPT
cat >"$folder/program.py" <<'PYTHON'
import base64
import sys

for line in sys.stdin:
    data, text, decoded = line.rstrip("\n").split(" ")
    expected = base64.a85encode(bytes.fromhex(data), adobe=True).decode()
    print(f"{data}: written as {text}, expected {expected}; read back as {decoded or 'nothing'}")
PYTHON
seen=$(node "$folder/program.cjs" | python3 "$folder/program.py")
expected='6162636465: written as <~@:E_WAH~>, expected <~@:E_WAH~>; read back as 6162636465
0001: written as <~!!*~>, expected <~!!*~>; read back as 0001
0000: written as <~~>, expected <~!!!~>; read back as nothing
6162636400: written as <~@:E~>, expected <~@:E_W!!~>; read back as 6162
616263640000: written as <~@:E_~>, expected <~@:E_W!!!~>; read back as 616263
6162636400000000: written as <~@:E_Wz~>, expected <~@:E_Wz~>; read back as 6162636400000000
0000000000000000: written as <~zz~>, expected <~zz~>; read back as 00000000
000000000000000061626364: written as <~zz@:E_W~>, expected <~zz@:E_W~>; read back as 0000000000000000
00000000616263640000000061626364: written as <~z@:E_Wz@:E_W~>, expected <~z@:E_Wz@:E_W~>; read back as 000000006162636400000000'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
