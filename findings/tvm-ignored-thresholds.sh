#!/usr/bin/env bash
# TVM 0.27.0.post1 (https://pypi.org/project/apache-tvm) keeps boxes below the score threshold of a model of ONNX, and no box at all, without an error, if
# the thresholds and the limit of boxes are inputs of the model.
#
# The operator NonMaxSuppression has them as inputs, so a program can choose them for each image. TVM reads constants. Otherwise it uses 0 boxes, a
# score of 0 and an overlap of 0.5 (tvm/relax/frontend/onnx/onnx_frontend.py, lines 5812 to 5850). The overlap is 0.5 also if the model has none, where
# ONNX has 0 (https://onnx.ai/onnx/operators/onnx__NonMaxSuppression.html). The mean and the inverse deviation that LayerNormalization returns are
# 0 (line 4614), and IsInf ignores `detect_negative` (line 2655). ONNX Runtime 1.31.0 computes the expected results.
#
# Seen on 1 December 2026 on x86-64 Linux: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check apache-tvm==0.27.0.post1 onnx==1.23.2 onnxruntime==1.31.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import numpy
import onnx
import onnxruntime
import tvm
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx


def show(array):
    return array.astype(float).round(2).tolist() if array.dtype == numpy.float32 else array.tolist()


def compare(title, node, inputs, constants, outputs):
    def describe(name, array):
        return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)

    sources = [describe(name, array) for name, array in inputs.items()]
    results = [onnx.helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in outputs]
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = onnx.helper.make_graph([node], "graph", sources, results, tensors)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    machine = relax.VirtualMachine(tvm.compile(relax.transform.LegalizeOps()(from_onnx(model)), target="llvm"), tvm.cpu())
    found = machine["main"](*[tvm.runtime.tensor(array) for array in inputs.values()])
    found = [found] if isinstance(found, tvm.runtime.Tensor) else list(found)
    print(f"{title}:")
    for name, arrays in (("ONNX Runtime", session.run(None, inputs)), ("TVM", [result.numpy() for result in found])):
        print(f"  {name}:", *map(show, arrays))


boxes = numpy.array([[[0, 0, 1, 1], [0, 0.6, 1, 1.6], [0, 10, 1, 11], [0, 20, 1, 21]]], numpy.float32)
scores = numpy.array([[[0.9, 0.8, 0.6, 0.3]]], numpy.float32)
data = {"boxes": boxes, "scores": scores}
limit = {"limit": numpy.array([4])}
thresholds = {"overlap": numpy.array([0.1], numpy.float32), "score": numpy.array([0.5], numpy.float32)}
suppression = onnx.helper.make_node("NonMaxSuppression", ["boxes", "scores", "limit", "overlap", "score"], ["kept"])
kept = [("kept", onnx.TensorProto.INT64, [None, 3])]
compare("boxes, constants", suppression, data, limit | thresholds, kept)
compare("boxes, thresholds as inputs", suppression, data | thresholds, limit, kept)
compare("boxes, limit as an input", suppression, data | limit, thresholds, kept)
without = onnx.helper.make_node("NonMaxSuppression", ["boxes", "scores", "limit"], ["kept"])
compare("boxes, no threshold", without, data, limit, kept)

rows = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
statistics = [(name, onnx.TensorProto.FLOAT, [2, width]) for name, width in (("y", 3), ("mean", 1), ("inverse", 1))]
normalization = onnx.helper.make_node("LayerNormalization", ["x", "scale"], [name for name, _, _ in statistics])
compare("layer normalization", normalization, {"x": rows}, {"scale": numpy.ones(3, numpy.float32)}, statistics)
infinities = numpy.array([-numpy.inf, 1, numpy.inf], numpy.float32)
positive = onnx.helper.make_node("IsInf", ["x"], ["y"], detect_negative=0)
compare("positive infinity", positive, {"x": infinities}, {}, [("y", onnx.TensorProto.BOOL, [3])])
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py")
expected='boxes, constants:
  ONNX Runtime: [[0, 0, 0], [0, 0, 2]]
  TVM: [[0, 0, 0], [0, 0, 2]]
boxes, thresholds as inputs:
  ONNX Runtime: [[0, 0, 0], [0, 0, 2]]
  TVM: [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 3]]
boxes, limit as an input:
  ONNX Runtime: [[0, 0, 0], [0, 0, 2]]
  TVM: []
boxes, no threshold:
  ONNX Runtime: [[0, 0, 0], [0, 0, 2], [0, 0, 3]]
  TVM: [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 3]]
layer normalization:
  ONNX Runtime: [[-1.22, 0.0, 1.22], [-1.22, 0.0, 1.22]] [[1.0], [4.0]] [[1.22], [1.22]]
  TVM: [[-1.22, 0.0, 1.22], [-1.22, 0.0, 1.22]] 0.0 0.0
positive infinity:
  ONNX Runtime: [False, False, True]
  TVM: [True, False, True]'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
