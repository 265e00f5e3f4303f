#!/usr/bin/env bash
# node-wav 0.0.2 (https://www.npmjs.com/package/node-wav) and wav-decoder 1.3.0 (https://www.npmjs.com/package/wav-decoder) read the lowest sample of 24
# bits, -1, as the highest one, 1, without an error.
#
# Samples of 24 bits are signed. Both decoders subtract 2^24 from a value only if it is more than 2^23 (index.js, line 36; index.js, line 211), so -2^23 stays
# positive. Audio that is clipped contains it often: each clipped wave jumps from the bottom to the top. Both encoders write -2^23 for -1, so a file that
# they wrote has it too. Samples of 16 and 32 bits are right.
#
# `decode` of node-wav also compares a position in the whole memory of a Node.js Buffer with the length of the Buffer. So it returns undefined for a
# part of a larger Buffer, although its comment states that it considers the offset.
#
# Seen on 1 December 2026 on x86-64 Linux, with Node.js 20.20 and Python 3.11: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs Node.js 18 or later with npm, the npm registry, and Python 3.8 or later.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" node-wav@0.0.2 wav-decoder@1.3.0 wav-encoder@1.3.0
cat >"$folder/write.py" <<'PYTHON'
import sys
import wave

for size in 2, 3, 4:
    highest = (1 << (8 * size - 1)) - 1
    samples = [0, highest, 0, -highest, -highest - 1, -highest - 1, -highest, 0]
    with wave.open(f"{sys.argv[1]}/{8 * size}.wav", "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(size)
        file.setframerate(48000)
        file.writeframes(b"".join(sample.to_bytes(size, "little", signed=True) for sample in samples))
PYTHON
python3 "$folder/write.py" "$folder"
cat >"$folder/program.cjs" <<'JAVASCRIPT'
const fs = require("fs");
const nodeWav = require("node-wav");
const wavDecoder = require("wav-decoder");
const wavEncoder = require("wav-encoder");

const decoders = { "node-wav": nodeWav.decode, "wav-decoder": wavDecoder.decode.sync };
const print = (audio) => (audio ? Array.from(audio.channelData[0], (sample) => sample.toFixed(3)).join(" ") : audio);
// A copy that starts at the beginning of its memory.
const exact = (bytes) => Uint8Array.from(bytes).buffer;
for (const bits of [16, 24, 32]) {
  const bytes = fs.readFileSync(`${process.argv[2]}/${bits}.wav`);
  for (const [name, decode] of Object.entries(decoders)) console.log(`${bits} bits, ${name}: ${print(decode(exact(bytes)))}`);
}
const samples = Float32Array.from([1, 0, -1]);
const options = { sampleRate: 48000, bitDepth: 24 };
console.log(`1 0 -1 written and read, node-wav: ${print(nodeWav.decode(exact(nodeWav.encode([samples], options))))}`);
const written = wavEncoder.encode.sync({ sampleRate: 48000, channelData: [samples] }, options);
console.log(`1 0 -1 written and read, wav-encoder and wav-decoder: ${print(wavDecoder.decode.sync(written))}`);
const file = fs.readFileSync(`${process.argv[2]}/16.wav`);
const larger = Buffer.concat([Buffer.alloc(4096), file]);
for (const [name, decode] of Object.entries(decoders)) console.log(`part of a Buffer, ${name}: ${print(decode(larger.subarray(4096)))}`);
JAVASCRIPT
seen=$(node "$folder/program.cjs" "$folder")
expected='16 bits, node-wav: 0.000 1.000 0.000 -1.000 -1.000 -1.000 -1.000 0.000
16 bits, wav-decoder: 0.000 1.000 0.000 -1.000 -1.000 -1.000 -1.000 0.000
24 bits, node-wav: 0.000 1.000 0.000 -1.000 1.000 1.000 -1.000 0.000
24 bits, wav-decoder: 0.000 1.000 0.000 -1.000 1.000 1.000 -1.000 0.000
32 bits, node-wav: 0.000 1.000 0.000 -1.000 -1.000 -1.000 -1.000 0.000
32 bits, wav-decoder: 0.000 1.000 0.000 -1.000 -1.000 -1.000 -1.000 0.000
1 0 -1 written and read, node-wav: 1.000 0.000 1.000
1 0 -1 written and read, wav-encoder and wav-decoder: 1.000 0.000 1.000
part of a Buffer, node-wav: undefined
part of a Buffer, wav-decoder: 0.000 1.000 0.000 -1.000 -1.000 -1.000 -1.000 0.000'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
