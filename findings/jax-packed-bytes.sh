#!/usr/bin/env bash
# Arrays of 2 or 4 bits per number in JAX 0.10.2 (https://pypi.org/project/jax) report two to four times their memory.
#
# JAX packs two numbers of `int4` or four of `int2` into a byte. `nbytes`, `jax.live_arrays()`, the heap profile and `on_device_size_in_bytes`
# have a byte for each number, so a comparison by them shows that numbers of 4 bits save nothing over `int8`. `memory_analysis` of a compiled
# program has the true size. `on_device_size_in_bytes` of JAX 0.7.2 had it too.
#
# The script needs no GPU. Each array has 2^26 ones. It prints MiB, the last by glibc's `malloc_usable_size` of the array's address, and the
# first byte of the array: 0x11 has two numbers, 0x55 has four.
#
# Seen on 30 November 2026 on x86-64 Linux: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import ctypes

import jax
import jax.numpy as jnp

MIB = 1 << 20
usable = ctypes.CDLL(None).malloc_usable_size
usable.restype, usable.argtypes = ctypes.c_size_t, [ctypes.c_void_p]

for name in ("int8", "int4", "float4_e2m1fn", "int2"):
    array = jax.block_until_ready(jnp.ones(64 * MIB, name))
    address = array.unsafe_buffer_pointer()
    live = sum(each.nbytes for each in jax.live_arrays())
    analysis = jax.jit(lambda x: x[::-1]).lower(array).compile().memory_analysis().argument_size_in_bytes
    first = ctypes.string_at(address, 1)[0]
    sizes = array.nbytes, live, array.on_device_size_in_bytes(), analysis, usable(address)
    labels = "nbytes", "live_arrays", "on_device_size_in_bytes", "memory_analysis", "memory"
    print(f"{name}: " + ", ".join(f"{label} {size // MIB}" for label, size in zip(labels, sizes)) + f"; byte {first:#04x}")
    del array
PYTHON
seen=$(JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py")
expected='int8: nbytes 64, live_arrays 64, on_device_size_in_bytes 64, memory_analysis 64, memory 64; byte 0x01
int4: nbytes 64, live_arrays 64, on_device_size_in_bytes 64, memory_analysis 32, memory 32; byte 0x11
float4_e2m1fn: nbytes 64, live_arrays 64, on_device_size_in_bytes 64, memory_analysis 32, memory 32; byte 0x22
int2: nbytes 64, live_arrays 64, on_device_size_in_bytes 64, memory_analysis 16, memory 16; byte 0x55'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
