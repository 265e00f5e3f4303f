#!/usr/bin/env bash
# Printing an array that is split over several devices triples its share of `jax.live_arrays()` in JAX 0.10.2 (https://pypi.org/project/jax). The
# devices' memory does not change.
#
# JAX documents `jax.live_arrays()` as all live arrays, so programs sum `nbytes` over them to know their memory. `str`, `numpy.asarray` and
# `jax.device_get` read each part of an array (jax/_src/array.py, lines 643 and 647). Each read creates an array for the part, which the
# list contains until the whole array is deleted. `addressable_shards` (line 518) creates one array per part, which doubles the sum. The heap
# profile of JAX counts each buffer once.
#
# The script needs no GPU: it gives the process four devices of the CPU. Each row has an array of 64 MiB. It prints the MiB of
# `jax.live_arrays()` before and after an action, then the MiB of buffers in the heap profile.
#
# Seen on 30 November 2026 on x86-64 Linux, also with JAX 0.6.2: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import gc
import gzip

import jax
import numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MIB = 1 << 20


def live():
    return sum(array.nbytes for array in jax.live_arrays()) // MIB


def number(message, position):
    """An integer of Protocol Buffers, and the position after it."""
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position


def fields(message):
    """The fields of a message of Protocol Buffers."""
    position = 0
    while position < len(message):
        key, position = number(message, position)
        value, position = number(message, position)
        if key & 7 == 2:
            value, position = message[position : position + value], position + value
        yield key >> 3, value


def profile():
    """The MiB of all samples of the heap profile with the label `kind: buffer`."""
    message = list(fields(gzip.decompress(jax.profiler.device_memory_profile())))
    texts = [value.decode() for key, value in message if key == 6]
    total = 0
    for sample in (list(fields(value)) for key, value in message if key == 2):
        labels = [dict(fields(value)) for key, value in sample if key == 3]
        if any(texts[label[1]] == "kind" and texts[label[2]] == "buffer" for label in labels if 2 in label):
            # A sample has two values: objects and bytes.
            values = next(value for key, value in sample if key == 2)
            total += number(values, number(values, 0)[1])[0]
    return total // MIB


split = NamedSharding(Mesh(numpy.array(jax.devices()), ("device",)), PartitionSpec("device"))
actions = {
    "array + 1": lambda array: jax.block_until_ready(array + 1),
    "array.addressable_shards": lambda array: array.addressable_shards,
    "str(array)": str,
    "numpy.asarray(array)": numpy.asarray,
}
for name, action in actions.items():
    array = jax.block_until_ready(jax.device_put(numpy.ones(16 * MIB, numpy.float32), split))
    before = live()
    action(array)
    gc.collect()
    print(f"{name}: {before}, then {live()}; profile {profile()}")
    del array
    gc.collect()
print(f"at the end: {live()}")
PYTHON
seen=$(JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 "$folder/venv/bin/python" "$folder/program.py")
expected='array + 1: 64, then 64; profile 64
array.addressable_shards: 64, then 128; profile 64
str(array): 64, then 192; profile 64
numpy.asarray(array): 64, then 192; profile 64
at the end: 0'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
