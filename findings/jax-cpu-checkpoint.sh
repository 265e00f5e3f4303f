#!/usr/bin/env bash
# `jax.checkpoint` of JAX 0.10.2 (https://pypi.org/project/jax) saves no memory on the CPU, except in a loop of `jax.lax.scan`.
#
# `jax.checkpoint` keeps no results within a function for the backward pass, which computes them again. JAX puts a barrier around the second
# computation, so that the compiler does not join it with the first one. On the CPU, the compiler removes the barrier first, and then joins both.
# The results are kept, as without `jax.checkpoint`. `prevent_cse` is on, which is the default. In a scan, both computations are in different loops.
# A plan that was made on the CPU does not hold for a device whose compiler keeps the barrier.
#
# The script needs no GPU. The program is the gradient of four layers of four products; each result has 64 MiB. It prints the products and barriers that
# JAX gives to the compiler, the products that are left, and the MiB of temporary memory by `memory_analysis`.
#
# Seen on 30 November 2026 on x86-64 Linux, also with JAX 0.7.2: the lines in `expected` below.
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
weight = jnp.ones((16, 16))


def layer(x):
    for _ in range(4):
        x = jnp.sin(x @ weight)
    return x


def unrolled(layer, x):
    for _ in range(4):
        x = layer(x)
    return x.sum()


def scanned(layer, x):
    return jax.lax.scan(lambda x, _: (layer(x), None), x, None, 4)[0].sum()


for layers in (unrolled, scanned):
    for name, one in (("without", layer), ("with", jax.checkpoint(layer))):
        given = jax.jit(jax.grad(lambda x: layers(one, x))).lower(jax.ShapeDtypeStruct((MIB, 16), jnp.float32))
        compiled = given.compile()
        text = given.as_text()
        print(
            f"{layers.__name__} {name}: given {text.count('stablehlo.dot_general')} products, {text.count('stablehlo.optimization_barrier')} barriers;"
            f" left {compiled.as_text().count(' dot(')} products; temporary {compiled.memory_analysis().temp_size_in_bytes // MIB}"
        )
PYTHON
seen=$(JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py")
expected='unrolled without: given 32 products, 0 barriers; left 32 products; temporary 1024
unrolled with: given 44 products, 4 barriers; left 32 products; temporary 1024
scanned without: given 8 products, 0 barriers; left 8 products; temporary 1152
scanned with: given 12 products, 1 barriers; left 12 products; temporary 576'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
