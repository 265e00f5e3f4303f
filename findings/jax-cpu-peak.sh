#!/usr/bin/env bash
# `peak_memory_in_bytes` of JAX 0.10.2 (https://pypi.org/project/jax) leaves out temporary memory on the CPU, so that it can be a ninth of the peak.
#
# `jax.jit(f).lower(x).compile().memory_analysis()` has the memory of a compiled program before it runs. On the CPU, `peak_memory_in_bytes` has
# the arguments and results only, and can be less than `temp_size_in_bytes`. The peak there is the sum of `argument_size_in_bytes`,
# `output_size_in_bytes` and `temp_size_in_bytes`, less `alias_size_in_bytes`. A batch that is chosen by the wrong figure needs more memory
# than there is. The script does not show what GPUs report.
#
# The script needs no GPU. Each row is the gradient of 1, 4 or 16 layers, each of which keeps 64 MiB. It prints MiB of the analysis, then
# whether the process needed the temporary memory too, by the peak of its resident memory over that before the run.
#
# Seen on 30 November 2026 on x86-64 Linux, also with JAX 0.7.2: the lines in `expected` below. JAX 0.6.2 has no `peak_memory_in_bytes` on the CPU.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import jax
import jax.numpy as jnp

MIB = 1 << 20


def resident(name):
    """MiB of a line of the process's status."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) >> 10


def loss(x, weight, layers):
    for _ in range(layers):
        x = jnp.sin(x @ weight)
    return x.sum()


x, weight = jax.block_until_ready((jnp.ones((MIB, 16)), jnp.ones((16, 16))))
for layers in (1, 4, 16):
    program = jax.jit(jax.grad(loss), static_argnums=2).lower(x, weight, layers).compile()
    told = program.memory_analysis()
    arguments, output, temporary, peak = (
        size // MIB for size in (told.argument_size_in_bytes, told.output_size_in_bytes, told.temp_size_in_bytes, told.peak_memory_in_bytes)
    )
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = resident("VmRSS")
    result = jax.block_until_ready(program(x, weight))
    needed = resident("VmHWM") - before >= (output + temporary) * 0.9
    print(f"layers {layers}: arguments {arguments}, output {output}, temporary {temporary}; peak {peak}; needed more than the peak: {'yes' if needed else 'no'}")
    del result
PYTHON
seen=$(JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py")
expected='layers 1: arguments 64, output 64, temporary 64; peak 128; needed more than the peak: yes
layers 4: arguments 64, output 64, temporary 256; peak 128; needed more than the peak: yes
layers 16: arguments 64, output 64, temporary 1024; peak 128; needed more than the peak: yes'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
