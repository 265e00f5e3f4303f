#!/usr/bin/env bash
# MNN 3.6.1 (https://pypi.org/project/MNN) returns the opposite of `less` for each two different negative floats on x86-64, without an error: -1 < -2 is
# true, and -2 < -1 is false.
#
# A comparison of the bits of floats as signed integers has this result: it is wrong if both are negative, and right otherwise. `greater`, `less_equal`
# and `greater_equal` are right, and so is `less` for integers. The operator `<` of an array and a converted `Less` of ONNX are wrong too. So a mask of
# the logits below -1 has none of 442. NumPy 2.4.6 computes the expected masks.
#
# Seen on 1 December 2026 on x86-64 Linux: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check MNN==3.6.1 onnx==1.23.2 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import sys

import _tools
import MNN.expr
import MNN.nn
import MNN.numpy
import numpy
import onnx


def bits(mask):
    return "".join(str(int(value)) for value in mask)


left = numpy.array([-2, -1, -1, -2, -1, 1, 1, 2], numpy.float32)
right = numpy.array([-1, -2, -1, 1, 0, -1, 2, 1], numpy.float32)
left_mnn, right_mnn = MNN.numpy.array(left.tolist()), MNN.numpy.array(right.tolist())
for name in ("less", "less_equal", "greater", "greater_equal"):
    mask = getattr(MNN.numpy, name)(left_mnn, right_mnn)
    print(f"{name}: MNN {bits(mask.read())}, NumPy {bits(getattr(numpy, name)(left, right))}")
for kind in (numpy.int32, numpy.float32):
    logits = numpy.random.default_rng(1).integers(-9, 9, 1000).astype(kind)
    array = MNN.numpy.array(logits.tolist())
    limit = MNN.numpy.array([kind(-1).item()])
    below = array < limit
    wrong = below.read().astype(bool) != (logits < -1)
    print(f"{kind.__name__}: {below.read().sum()} of 1000 logits below -1, NumPy {(logits < -1).sum()}, different {wrong.sum()}")

sources = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [8]) for name in ("left", "right")]
result = onnx.helper.make_tensor_value_info("mask", onnx.TensorProto.BOOL, [8])
node = onnx.helper.make_node("Less", ["left", "right"], ["mask"])
model = onnx.helper.make_model(onnx.helper.make_graph([node], "graph", sources, [result]), opset_imports=[onnx.helper.make_opsetid("", 13)])
onnx.checker.check_model(model)
onnx.save(model, "model.onnx")
_tools.mnnconvert(["mnnconvert", "-f", "ONNX", "--modelFile", "model.onnx", "--MNNModel", "model.mnn", "--bizCode", "finding"])
module = MNN.nn.load_module_from_file("model.mnn", ["left", "right"], ["mask"])
mask = module.forward([left_mnn, right_mnn])[0]
print(f"Less of ONNX: MNN {bits(mask.read())}")
PYTHON
cd "$folder"
seen=$(venv/bin/python program.py | grep -E '^(less|greater|int32|float32|Less)')
expected='less: MNN 01011010, NumPy 10011010
less_equal: MNN 10111010, NumPy 10111010
greater: MNN 01000101, NumPy 01000101
greater_equal: MNN 01100101, NumPy 01100101
int32: 442 of 1000 logits below -1, NumPy 442, different 0
float32: 0 of 1000 logits below -1, NumPy 442, different 442
Less of ONNX: MNN 01011010'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
