#!/usr/bin/env bash
# MNN 3.6.1 (https://pypi.org/project/MNN) reduces all axes of a tensor, without an error, if a norm or a sum of squares of ONNX has its axes as an input,
# as it has from version 18 of the operators on: the norms of two rows are one number.
#
# The converter reads the input for ReduceSum, ReduceMax and ReduceMean, but not for ReduceL1, ReduceL2, ReduceSumSquare, ReduceLogSum and
# ReduceLogSumExp. PyTorch's exporter writes version 18 or later. The converter also ignores the reduction of ScatterND, so `add` replaces elements,
# and for a Mod of floats with `fmod`, the result has the sign of the divisor instead of the dividend. ONNX Runtime 1.31.0 computes the expected results.
#
# Seen on 1 December 2026 on x86-64 Linux: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check MNN==3.6.1 onnx==1.23.2 onnxruntime==1.31.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import _tools
import MNN.nn
import MNN.numpy
import numpy
import onnx
import onnxruntime


def compare(title, version, operator, data, constants, shape, **attributes):
    sources = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, array.shape) for name, array in data.items()]
    result = onnx.helper.make_tensor_value_info("result", onnx.TensorProto.FLOAT, shape)
    node = onnx.helper.make_node(operator, [*data, *constants], ["result"], **attributes)
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = onnx.helper.make_graph([node], "graph", sources, [result], tensors)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", version)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "model.onnx")
    _tools.mnnconvert(["mnnconvert", "-f", "ONNX", "--modelFile", "model.onnx", "--MNNModel", "model.mnn", "--bizCode", "finding"])
    module = MNN.nn.load_module_from_file("model.mnn", list(data), ["result"])
    arrays = [MNN.numpy.array(array.tolist()) for array in data.values()]
    outputs = module.forward(arrays)
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    expected = session.run(None, data)[0]
    texts = [numpy.asarray(values, float).round(2).tolist() for values in (outputs[0].read(), expected)]
    print(f"= {title}: MNN {texts[0]}, ONNX Runtime {texts[1]}")


rows = {"x": numpy.array([[3, 4], [6, 8]], numpy.float32)}
for operator in ("ReduceSum", "ReduceMax", "ReduceL2", "ReduceL1", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"):
    if operator != "ReduceSum":
        compare(f"{operator} of version 13", 13, operator, rows, {}, [2], axes=[1], keepdims=0)
    compare(f"{operator} of version 18", 18, operator, rows, {"axes": numpy.array([1])}, [2], keepdims=0)
vector = {"x": numpy.array([1, 2, 3, 4], numpy.float32)}
update = {"indices": numpy.array([[1], [3]]), "updates": numpy.array([10, 20], numpy.float32)}
for reduction in ("none", "add", "mul", "max"):
    compare(f"ScatterND, {reduction}", 18, "ScatterND", vector, update, [4], reduction=reduction)
operands = {"x": numpy.array([-7.5, 7.5, -7.5], numpy.float32), "y": numpy.array([2, -2, -2], numpy.float32)}
compare("Mod with fmod", 13, "Mod", operands, {}, [3], fmod=1)
PYTHON
cd "$folder"
seen=$(venv/bin/python program.py | sed -n 's/^= //p')
expected='ReduceSum of version 18: MNN [7.0, 14.0], ONNX Runtime [7.0, 14.0]
ReduceMax of version 13: MNN [4.0, 8.0], ONNX Runtime [4.0, 8.0]
ReduceMax of version 18: MNN [4.0, 8.0], ONNX Runtime [4.0, 8.0]
ReduceL2 of version 13: MNN [5.0, 10.0], ONNX Runtime [5.0, 10.0]
ReduceL2 of version 18: MNN 11.18, ONNX Runtime [5.0, 10.0]
ReduceL1 of version 13: MNN [7.0, 14.0], ONNX Runtime [7.0, 14.0]
ReduceL1 of version 18: MNN 21.0, ONNX Runtime [7.0, 14.0]
ReduceSumSquare of version 13: MNN [25.0, 100.0], ONNX Runtime [25.0, 100.0]
ReduceSumSquare of version 18: MNN 125.0, ONNX Runtime [25.0, 100.0]
ReduceLogSum of version 13: MNN [1.95, 2.64], ONNX Runtime [1.95, 2.64]
ReduceLogSum of version 18: MNN 3.04, ONNX Runtime [1.95, 2.64]
ReduceLogSumExp of version 13: MNN [4.31, 8.13], ONNX Runtime [4.31, 8.13]
ReduceLogSumExp of version 18: MNN 8.15, ONNX Runtime [4.31, 8.13]
ScatterND, none: MNN [1.0, 10.0, 3.0, 20.0], ONNX Runtime [1.0, 10.0, 3.0, 20.0]
ScatterND, add: MNN [1.0, 10.0, 3.0, 20.0], ONNX Runtime [1.0, 12.0, 3.0, 24.0]
ScatterND, mul: MNN [1.0, 10.0, 3.0, 20.0], ONNX Runtime [1.0, 20.0, 3.0, 80.0]
ScatterND, max: MNN [1.0, 10.0, 3.0, 20.0], ONNX Runtime [1.0, 10.0, 3.0, 20.0]
Mod with fmod: MNN [0.5, -0.5, -1.5], ONNX Runtime [-1.5, 1.5, -1.5]'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
