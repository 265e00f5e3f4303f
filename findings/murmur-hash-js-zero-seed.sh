#!/usr/bin/env bash
# murmur-hash-js 1.0.0 (https://www.npmjs.com/package/murmur-hash-js) hashes with the seed 19088743 if the seed is 0, without an error.
#
# MurmurHash starts from a seed, and 0 is the usual one: MurmurHash3 of "The quick brown fox jumps over the lazy dog" is 2e4ff723. The library takes a
# seed of 0 for a missing one, and uses 0x01234567 instead (murmurhash3_gc.js, line 23; murmurhash2_gc.js, line 15). So its hashes find no partition, no
# shard and no entry that another implementation made with the seed 0. Its readme documents the seed as the initial one, without a default. Other
# seeds are right.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20 and mmh3 5.3.1: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, the npm registry, python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" murmur-hash-js@1.0.0 murmurhash@2.0.1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mmh3==5.3.1
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const library = require("murmur-hash-js");
const other = require("murmurhash");

const key = "The quick brown fox jumps over the lazy dog";
const hex = (hash) => (hash >>> 0).toString(16).padStart(8, "0");
for (const seed of [0, 1, 19088743]) {
  console.log(`MurmurHash3, seed ${seed}: murmur-hash-js ${hex(library.murmur3(key, seed))}, murmurhash ${hex(other.v3(key, seed))}`);
  console.log(`MurmurHash2, seed ${seed}: murmur-hash-js ${hex(library.murmur2(key, seed))}, murmurhash ${hex(other.v2(key, seed))}`);
}
JAVASCRIPT
cat >"$folder/program.py" <<'PYTHON'
import mmh3

for seed in 0, 1, 19088743:
    print(f"MurmurHash3, seed {seed}: mmh3 {mmh3.hash('The quick brown fox jumps over the lazy dog', seed, signed=False):08x}")
PYTHON
seen=$(node "$folder/program.cjs"; "$folder/venv/bin/python" "$folder/program.py")
expected='MurmurHash3, seed 0: murmur-hash-js 07e8d96f, murmurhash 2e4ff723
MurmurHash2, seed 0: murmur-hash-js 0f0bd462, murmurhash 212729d0
MurmurHash3, seed 1: murmur-hash-js 78e69e27, murmurhash 78e69e27
MurmurHash2, seed 1: murmur-hash-js 1e1049e7, murmurhash 1e1049e7
MurmurHash3, seed 19088743: murmur-hash-js 07e8d96f, murmurhash 07e8d96f
MurmurHash2, seed 19088743: murmur-hash-js 0f0bd462, murmurhash 0f0bd462
MurmurHash3, seed 0: mmh3 2e4ff723
MurmurHash3, seed 1: mmh3 78e69e27
MurmurHash3, seed 19088743: mmh3 07e8d96f'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
