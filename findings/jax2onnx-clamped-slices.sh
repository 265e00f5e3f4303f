#!/usr/bin/env bash
# jax2onnx 0.17.1 (https://pypi.org/project/jax2onnx) exports a slice of three elements as one of fewer elements, if it starts near the end, and rounds
# 2.5 to 2 instead of 3, without an error.
#
# `jax.lax.dynamic_slice` moves a start that is out of bounds, so the result always has its whole size
# (https://docs.jax.dev/en/latest/_autosummary/jax.lax.dynamic_slice.html). The exported Slice of ONNX ends at the end of the array, and a negative start
# counts from it. `jax.lax.round` rounds halves away from zero by default; the exported Round of ONNX rounds them to even numbers. `jax.nn.one_hot` of -1 has no one;
# the exported OneHot has it at the last class. `jnp.abs` of complex numbers is the exported Abs of their real and imaginary parts. The
# maximum of numbers with a NaN is NaN in JAX only.
#
# Seen on 1 December 2026 on x86-64 Linux, with jax 0.10.2, onnx 1.23.2 and onnxruntime 1.32.0: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check jax2onnx==0.17.1 jax==0.10.2 jaxlib==0.10.2 onnx==1.23.2 onnxruntime==1.32.0 \
    numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy
import onnxruntime
from jax2onnx import to_onnx


def show(name, function, *inputs):
    """Prints the result of a function in JAX, and of its export in ONNX Runtime."""
    inputs = [numpy.asarray(value) for value in inputs]
    model = to_onnx(function, inputs=[jax.ShapeDtypeStruct(value.shape, value.dtype) for value in inputs], model_name="model")
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    exported = session.run(None, {node.name: value for node, value in zip(session.get_inputs(), inputs)})[0]
    expected = numpy.asarray(function(*(jnp.asarray(value) for value in inputs)))
    print(f"{name}: JAX {numpy.round(expected, 3).tolist()}, exported {numpy.round(exported, 3).tolist()}")


numbers = numpy.arange(7, dtype=numpy.float32)
for start in 2, 5, -2:
    show(f"3 elements from {start}", lambda values, start: jax.lax.dynamic_slice(values, (start,), (3,)), numbers, numpy.int32(start))
halves = numpy.array([-2.5, -0.5, 0.5, 1.5, 2.5], numpy.float32)
show("jax.lax.round", lambda values: jax.lax.round(values), halves)
show("jnp.round", lambda values: jnp.round(values), halves)
show("one hot of 0 and -1", lambda classes: jax.nn.one_hot(classes, 3), numpy.array([0, -1], numpy.int32))
show("magnitudes of a spectrum", lambda values: jnp.abs(jnp.fft.rfft(values)), numpy.array([1, 2, 4, 8], numpy.float32))
show("maximum with a NaN", lambda values: jnp.max(values), numpy.array([1, numpy.nan, 2], numpy.float32))
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py" 2>"$folder/errors")
expected='3 elements from 2: JAX [2.0, 3.0, 4.0], exported [2.0, 3.0, 4.0]
3 elements from 5: JAX [4.0, 5.0, 6.0], exported [5.0, 6.0]
3 elements from -2: JAX [4.0, 5.0, 6.0], exported [5.0, 6.0]
jax.lax.round: JAX [-3.0, -1.0, 1.0, 2.0, 3.0], exported [-2.0, -0.0, 0.0, 2.0, 2.0]
jnp.round: JAX [-2.0, -0.0, 0.0, 2.0, 2.0], exported [-2.0, -0.0, 0.0, 2.0, 2.0]
one hot of 0 and -1: JAX [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], exported [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
magnitudes of a spectrum: JAX [15.0, 6.708000183105469, 5.0], exported [[15.0, 0.0], [3.0, 6.0], [5.0, 0.0]]
maximum with a NaN: JAX nan, exported 2.0'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
