#!/usr/bin/env bash
# The reference evaluator of onnx 1.23.2 (https://pypi.org/project/onnx) divides by the sum of a row instead of its L1 norm: (3, -1, 1) becomes
# (1, -0.33, 0.33), without an error. MaxPool returns negative indices, and LpPool scales its last column.
#
# `onnx.reference.ReferenceEvaluator` is the package's implementation of the operators. LpNormalization with p = 1 divides by the sum of the absolute
# values (https://onnx.ai/onnx/operators/onnx__LpNormalization.html). The evaluator takes no absolute values
# (onnx/reference/ops/op_lp_normalization.py, line 15), so a row whose sum is 0 becomes 0. The indices of MaxPool exclude the padding, according to
# the specification, so none is negative. A window of LpPool that passes the edge with `ceil_mode` has the norm of fewer elements; the evaluator
# multiplies it by the root of the size of the window divided by their number. ONNX Runtime follows the specification.
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


def show(operator, values, outputs=1, **attributes):
    """Prints the last output of an operator in both implementations."""
    values = numpy.array(values, numpy.float32)
    names = [f"Y{index}" for index in range(outputs)]
    types = [TensorProto.FLOAT, TensorProto.INT64]
    graph = helper.make_graph(
        [helper.make_node(operator, ["X"], names, **attributes)],
        "graph",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, values.shape)],
        [helper.make_tensor_value_info(name, type, None) for name, type in zip(names, types)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for name, run in ("reference", ReferenceEvaluator(model).run), ("ONNX Runtime", session.run):
        print(f"{operator}, {name}:", *(f"{value:.4g}" for value in run(None, {"X": values})[-1].flatten()))


show("LpNormalization", [[3, -1, 1]], p=1)
show("LpNormalization", [[2, -2, 1, -1]], p=1)
show("LpNormalization", [[3, 1, 1]], p=1)
show("MaxPool", [[[[9, 1], [2, 3]]]], outputs=2, kernel_shape=[2, 2], pads=[1, 1, 1, 1])
show("LpPool", [[[3, 4, 5]]], kernel_shape=[2], strides=[2], ceil_mode=1)
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py")
expected='LpNormalization, reference: 1 -0.3333 0.3333
LpNormalization, ONNX Runtime: 0.6 -0.2 0.2
LpNormalization, reference: 0 0 0 0
LpNormalization, ONNX Runtime: 0.3333 -0.3333 0.1667 -0.1667
LpNormalization, reference: 0.6 0.2 0.2
LpNormalization, ONNX Runtime: 0.6 0.2 0.2
MaxPool, reference: -3 0 -1 0 0 3 1 3 3
MaxPool, ONNX Runtime: 0 0 1 0 0 3 2 3 3
LpPool, reference: 5 7.071
LpPool, ONNX Runtime: 5 5'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
