#!/usr/bin/env bash
# TensorFlow 2.21.0 (https://pypi.org/project/tensorflow) waits ten seconds before it raises ResourceExhaustedError.
#
# Its allocator tries a request again when another one is freed, and gives up after ten seconds. Nothing is freed in a program of one thread that waits
# for its own request, so each error costs ten seconds. A program that halves its batch after each error until it fits seems to hang: five steps take 50 s.
#
# The script needs no GPU: the CPU gets the same allocator, of 64 MiB. A tensor of 48 MiB is there, and another one is requested. The program prints
# whether the error takes ten seconds (10.0 s here), and whether a request that fits does.
#
# Seen on 30 November 2026 on x86-64 Linux: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3 of 3.10 to 3.13 with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tensorflow==2.21.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import time

import tensorflow as tf

kept = tf.fill((12 << 20,), 1.0)
for name, count in (("fits", 1 << 20), ("fails", 12 << 20)):
    begin = time.monotonic()
    try:
        tf.fill((count,), 1.0)
        end = "no error"
    except tf.errors.ResourceExhaustedError:
        end = "ResourceExhaustedError"
    waits = time.monotonic() - begin >= 9.9
    print(f"{name}: {end} {'after ten seconds' if waits else 'at once'}")
PYTHON
seen=$(TF_CPU_ALLOCATOR_USE_BFC=true TF_CPU_BFC_MEM_LIMIT_IN_MB=64 "$folder/venv/bin/python" "$folder/program.py" 2>"$folder/log") || {
    tail "$folder/log"
    exit 1
}
expected='fits: no error at once
fails: ResourceExhaustedError after ten seconds'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
