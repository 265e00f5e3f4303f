#!/usr/bin/env bash
# OpenVINO 2026.4.1 (https://pypi.org/project/openvino) returns the result of an LSTM without its peephole weights, and ignores two attributes of the
# operator Resize, without an error.
#
# The input P of an LSTM adds the state of the cell to its gates (https://onnx.ai/onnx/operators/onnx__LSTM.html). OpenVINO accepts it and does not use
# it. `exclude_outside` removes the weights outside of a picture from cubic filters, and `antialias` makes each pixel of a smaller picture a mean of all
# pixels that it covers (https://onnx.ai/onnx/operators/onnx__Resize.html). An open issue has the latter for cubic filters
# (https://github.com/openvinotoolkit/openvino/issues/35893). ONNX Runtime 1.31.0 computes the expected results.
#
# Seen on 1 December 2026 on x86-64 Linux, on the CPU: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openvino==2026.4.1 onnx==1.23.2 onnxruntime==1.31.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import numpy
import onnx
import onnxruntime
import openvino

core = openvino.Core()


def compare(title, operator, data, constants, inputs, outputs, shape, **attributes):
    source = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, data.shape)
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = onnx.helper.make_graph([onnx.helper.make_node(operator, inputs, outputs, **attributes)], "graph", [source], [result], tensors)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    binary = model.SerializeToString()
    session = onnxruntime.InferenceSession(binary, providers=["CPUExecutionProvider"])
    compiled = core.compile_model(core.read_model(binary), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    print(f"{title}:")
    for name, array in (("ONNX Runtime", session.run(None, {"x": data})[0]), ("OpenVINO", compiled([data])[0])):
        print(f"  {name}:", *(f"{value:.2f}" for value in array.flat))


random = numpy.random.default_rng(1)
sequence = random.standard_normal((3, 1, 2)).astype(numpy.float32)
weights = {name: random.standard_normal((1, 8, 2)).astype(numpy.float32) for name in "WR"}
lstm = dict(hidden_size=2, shape=[1, 1, 2], outputs=["", "y"])
compare("LSTM", "LSTM", sequence, weights, ["x", "W", "R"], **lstm)
peepholes = weights | {"P": numpy.full((1, 6), 2, numpy.float32)}
compare("LSTM with peepholes", "LSTM", sequence, peepholes, ["x", "W", "R", "", "", "", "", "P"], **lstm)

picture = numpy.array([0, 0, 80, 0, 0, 0, 0, 80], numpy.float32).reshape(1, 1, 1, 8)
scales = {"scales": numpy.array([1, 1, 1, 0.25], numpy.float32)}
resize = dict(inputs=["x", "", "scales"], outputs=["y"], shape=[1, 1, 1, 2])
for antialias in (0, 1):
    compare(f"Resize, linear, antialias {antialias}", "Resize", picture, scales, mode="linear", antialias=antialias, **resize)
half = {"scales": numpy.array([1, 1, 1, 0.5], numpy.float32)}
resize["shape"] = [1, 1, 1, 4]
for exclude in (0, 1):
    compare(f"Resize, cubic, exclude_outside {exclude}", "Resize", picture, half, mode="cubic", exclude_outside=exclude, **resize)
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py")
expected='LSTM:
  ONNX Runtime: -0.18 -0.01
  OpenVINO: -0.18 -0.01
LSTM with peepholes:
  ONNX Runtime: -0.12 -0.02
  OpenVINO: -0.18 -0.01
Resize, linear, antialias 0:
  ONNX Runtime: 40.00 0.00
  OpenVINO: 40.00 0.00
Resize, linear, antialias 1:
  ONNX Runtime: 17.50 25.00
  OpenVINO: 40.00 0.00
Resize, cubic, exclude_outside 0:
  ONNX Runtime: -7.50 47.50 0.00 40.00
  OpenVINO: -7.50 47.50 0.00 40.00
Resize, cubic, exclude_outside 1:
  ONNX Runtime: -6.86 47.50 0.00 43.43
  OpenVINO: -7.50 47.50 0.00 40.00'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
