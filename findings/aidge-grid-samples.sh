#!/usr/bin/env bash
# Aidge 0.10.1 (https://pypi.org/project/aidge-backend-cpu) interpolates the middle of the pixels 1 to 9 as -9, and pads the wrong side of an image, without
# an error.
#
# Aidge is the framework of the Eclipse Foundation for embedded networks. The program imports models of ONNX with one operator. GridSample at (0, 0) is the
# middle of the image: 5 (https://onnx.ai/onnx/operators/onnx__GridSample.html). Its mode `nearest` is right. MaxPool and AveragePool pad the beginning
# with SAME_UPPER and the end with SAME_LOWER; the specification has them the other way. With a stride of 2, one element is left instead of four.
#
# ReduceL1 and ReduceL2 are 0 if they reduce all axes, or if the axes are an attribute, as up to version 17 of the operators. In this case only, Aidge
# prints a warning. ReduceSum is right. ONNX Runtime follows the specification in all of these.
#
# Seen on 1 December 2026 on x86-64 Linux, with onnxruntime 1.32.0 and onnx 1.23.2: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check aidge-core==0.10.1 aidge-onnx==0.10.1 aidge-backend-cpu==0.10.1 onnx==1.23.2 \
    onnxruntime==1.32.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import sys

import aidge_backend_cpu
import aidge_core
import aidge_onnx
import numpy
import onnx
import onnxruntime
from onnx import TensorProto, helper


def run(path, values):
    """The first output of a model in Aidge."""
    graph = aidge_onnx.load_onnx(path)
    graph.compile("cpu", aidge_core.dtype.float32, dims=[list(value.shape) for value in values.values()])
    aidge_core.SequentialScheduler(graph).forward(data=[aidge_core.Tensor(value) for value in values.values()])
    node, index = graph.get_ordered_outputs()[0]
    return numpy.array(node.get_operator().get_output(index))


def show(operator, *inputs, version=20, **attributes):
    """Prints the output of an operator in Aidge and in ONNX Runtime."""
    path = f"{sys.argv[1]}/model.onnx"
    values = {f"X{index}": numpy.array(value, numpy.float32) for index, value in enumerate(inputs)}
    graph = helper.make_graph(
        [helper.make_node(operator, list(values), ["Y"], **attributes)],
        "graph",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in values.items()],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)],
    )
    model = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=9))
    onnx.save(model, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    print(operator, *(f"{name}={value}" for name, value in attributes.items() if name != "kernel_shape"), end=": ", file=sys.stderr)
    print("Aidge", *(f"{value:g}" for value in run(path, values).flatten()), end=", ", file=sys.stderr)
    print("ONNX Runtime", *(f"{value:g}" for value in session.run(None, values)[0].flatten()), file=sys.stderr)


image = numpy.arange(1, 10).reshape(1, 1, 3, 3)
points = [[[[0, 0], [-1, -1], [0.5, 0]]]]
for mode in "nearest", "linear", "cubic":
    show("GridSample", image, points, mode=mode, align_corners=1, padding_mode="border")
for padding in "SAME_UPPER", "SAME_LOWER":
    show("MaxPool", image, kernel_shape=[2, 2], auto_pad=padding)
show("MaxPool", image, kernel_shape=[2, 2], strides=[2, 2], auto_pad="SAME_UPPER")
for operator in "ReduceL1", "ReduceSum":
    show(operator, [[3, -4], [1, 2]])
PYTHON
# Aidge writes warnings to the standard output, so the program writes to the standard error.
seen=$("$folder/venv/bin/python" "$folder/program.py" "$folder" 2>&1 >"$folder/warnings")
expected='GridSample mode=nearest align_corners=1 padding_mode=border: Aidge 5 1 6, ONNX Runtime 5 1 6
GridSample mode=linear align_corners=1 padding_mode=border: Aidge -9 -5 -8.5, ONNX Runtime 5 1 5.5
GridSample mode=cubic align_corners=1 padding_mode=border: Aidge 9 1 8.9375, ONNX Runtime 5 1 5.59375
MaxPool auto_pad=SAME_UPPER: Aidge 1 2 3 4 5 6 7 8 9, ONNX Runtime 5 6 6 8 9 9 8 9 9
MaxPool auto_pad=SAME_LOWER: Aidge 5 6 6 8 9 9 8 9 9, ONNX Runtime 1 2 3 4 5 6 7 8 9
MaxPool strides=[2, 2] auto_pad=SAME_UPPER: Aidge 5, ONNX Runtime 5 6 8 9
ReduceL1: Aidge 0, ONNX Runtime 10
ReduceSum: Aidge 2, ONNX Runtime 2'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
