#!/usr/bin/env bash
# tract 0.23.9 (https://pypi.org/project/tract) runs a recurrent layer of ONNX from the first step to the last one, without an error, if its direction is
# `reverse`.
#
# A layer of RNN, GRU or LSTM with this direction reads the sequence from its end (`direction` in
# https://onnx.ai/onnx/operators/onnx__LSTM.html). tract returns the result of a forward layer, bit by bit. With `bidirectional`, which has a layer of
# each direction, the reversed one is right. ONNX Runtime 1.31.0 computes all of them. A known issue lists other attributes that tract ignores
# (https://github.com/sonos/tract/issues/2751).
#
# Seen on 1 December 2026 on x86-64 Linux: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tract==0.23.9 onnx==1.23.2 onnxruntime==1.31.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import sys

import numpy
import onnx
import onnxruntime
import tract

steps, inputs, hidden = 4, 2, 3
random = numpy.random.default_rng(1)
sequence = random.standard_normal((steps, 1, inputs), numpy.float32)


def last_state(run, layer, gates, direction):
    layers = 2 if direction == "bidirectional" else 1
    generator = numpy.random.default_rng(2)
    weights = [generator.standard_normal((2, gates * hidden, width), numpy.float32) for width in (inputs, hidden)]
    tensors = [onnx.numpy_helper.from_array(array[:layers], name) for array, name in zip(weights, "WR")]
    node = onnx.helper.make_node(layer, ["X", "W", "R"], ["", "last"], hidden_size=hidden, direction=direction)
    source = onnx.helper.make_tensor_value_info("X", onnx.TensorProto.FLOAT, sequence.shape)
    result = onnx.helper.make_tensor_value_info("last", onnx.TensorProto.FLOAT, [layers, 1, hidden])
    graph = onnx.helper.make_graph([node], "graph", [source], [result], tensors)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 14)], ir_version=9)
    onnx.checker.check_model(model)
    path = f"{sys.argv[1]}/model.onnx"
    onnx.save(model, path)
    return run(path)


def run_tract(path):
    return tract.onnx().load(path).into_model().into_runnable().run([sequence])[0].to_numpy()


def run_onnxruntime(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"X": sequence})[0]


for layer, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4)):
    for direction in ("forward", "reverse", "bidirectional"):
        for run in (run_onnxruntime, run_tract):
            states = last_state(run, layer, gates, direction)[:, 0].round(3)
            print(f"{layer}, {direction}, {run.__name__[4:]}:", *(" ".join(f"{value:6.3f}" for value in state) for state in states), sep="  ")
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py" "$folder")
expected='RNN, forward, onnxruntime:  -0.998  0.958 -0.900
RNN, forward, tract:  -0.998  0.958 -0.900
RNN, reverse, onnxruntime:   0.999  0.275 -0.536
RNN, reverse, tract:  -0.998  0.958 -0.900
RNN, bidirectional, onnxruntime:  -0.998  0.958 -0.900  -0.946  0.934  0.997
RNN, bidirectional, tract:  -0.998  0.958 -0.900  -0.946  0.934  0.997
GRU, forward, onnxruntime:   0.979  0.340 -0.288
GRU, forward, tract:   0.979  0.340 -0.288
GRU, reverse, onnxruntime:   0.804 -0.132 -0.600
GRU, reverse, tract:   0.979  0.340 -0.288
GRU, bidirectional, onnxruntime:   0.979  0.340 -0.288   0.890  0.203 -0.094
GRU, bidirectional, tract:   0.979  0.340 -0.288   0.890  0.203 -0.094
LSTM, forward, onnxruntime:  -0.194 -0.253  0.008
LSTM, forward, tract:  -0.194 -0.253  0.008
LSTM, reverse, onnxruntime:  -0.057  0.179 -0.147
LSTM, reverse, tract:  -0.194 -0.253  0.008
LSTM, bidirectional, onnxruntime:  -0.194 -0.253  0.008   0.187  0.049 -0.280
LSTM, bidirectional, tract:  -0.194 -0.253  0.008   0.187  0.049 -0.280'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
