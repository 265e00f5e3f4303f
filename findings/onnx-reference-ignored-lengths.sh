#!/usr/bin/env bash
# The reference evaluator of onnx 1.23.2 (https://pypi.org/project/onnx) ignores the lengths of the sequences of an LSTM, a GRU or an RNN, and the
# activation functions and the clip of an LSTM or a GRU, without an error.
#
# `onnx.reference.ReferenceEvaluator` is the package's implementation of the operators. Each recurrent operator of the specification has an input
# `sequence_lens`: a batch of sequences of different lengths has steps of padding, whose results are zero
# (https://onnx.ai/onnx/operators/onnx__LSTM.html). The evaluator computes the padding too, so the last state of a short sequence is another one. LSTM and
# GRU use the default functions only, and no operator uses `clip` or `input_forget` (onnx/reference/ops/op_lstm.py). Zeros in the padding of the
# input do not help, because the biases still change the state. ONNX Runtime agrees with the formulas of the specification, which the program
# computes in numpy.
#
# Seen on 1 December 2026 on x86-64 Linux, with onnxruntime 1.32.0 and numpy 2.4.6: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import numpy
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def last_states(operator, **attributes):
    """The last state of two sequences, of three steps and of one, in the reference evaluator and in ONNX Runtime."""
    gates = GATES[operator]
    values = {
        "X": numpy.array([[[1], [1]], [[2], [0]], [[3], [0]]], numpy.float32),
        "W": numpy.full((1, gates, 1), 0.5, numpy.float32),
        "R": numpy.full((1, gates, 1), 0.25, numpy.float32),
        "B": numpy.full((1, 2 * gates), 0.1, numpy.float32),
        "lengths": numpy.array([3, 1], numpy.int32),
    }
    inputs = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape) for name, value in values.items()]
    node = helper.make_node(operator, list(values), ["", "state"], hidden_size=1, **attributes)
    outputs = [helper.make_tensor_value_info("state", TensorProto.FLOAT, None)]
    model = helper.make_model(
        helper.make_graph([node], "graph", inputs, outputs), opset_imports=[helper.make_opsetid("", 22)], ir_version=10
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [run(None, values)[0].flatten() for run in (ReferenceEvaluator(model).run, session.run)]


def lstm_step(x, state, cell, function=numpy.tanh):
    """One step of the formulas of the specification: all four gates have the same weights."""
    gate = 0.5 * x + 0.25 * state + 0.2
    sigmoid = 1 / (1 + numpy.exp(-gate))
    cell = sigmoid * cell + sigmoid * function(gate)
    return sigmoid * function(cell), cell


for operator in GATES:
    print(f"{operator}: reference %s, ONNX Runtime %s" % tuple(numpy.round(states, 4) for states in last_states(operator)))
print(f"LSTM, one step of the specification: {lstm_step(1, 0, 0)[0]:.4f}")
state = last_states("LSTM", activations=["Sigmoid", "Softsign", "Softsign"])
softsign = lambda value: value / (1 + abs(value))
print(f"LSTM with Softsign: reference {state[0][1]:.4f}, ONNX Runtime {state[1][1]:.4f}, specification {lstm_step(1, 0, 0, softsign)[0]:.4f}")
state = last_states("RNN", clip=0.5)
print(f"RNN with a clip of 0.5: reference {state[0][0]:.4f}, ONNX Runtime {state[1][0]:.4f}, specification {numpy.tanh(0.5):.4f}")
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py")
expected='LSTM: reference [0.8044 0.1884], ONNX Runtime [0.8044 0.2561]
GRU: reference [0.4302 0.2174], ONNX Runtime [0.4302 0.2005]
RNN: reference [0.9578 0.2769], ONNX Runtime [0.9578 0.6044]
LSTM, one step of the specification: 0.2561
LSTM with Softsign: reference 0.1884, ONNX Runtime 0.1442, specification 0.1442
RNN with a clip of 0.5: reference 0.9578, ONNX Runtime 0.4621, specification 0.4621'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
