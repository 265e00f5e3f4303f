#!/usr/bin/env bash
# tract 0.23.9 (https://pypi.org/project/tract) computes the activation function Celu of ONNX without its factor, without an error: with an alpha of 2,
# each negative result is half as large as it should be.
#
# Celu is max(0, x) + min(0, alpha * (exp(x / alpha) - 1)) (https://onnx.ai/onnx/operators/onnx__Celu.html). tract divides x by alpha, but does not
# multiply. The default alpha of 1 hides it, and the test data of ONNX for 32-bit floats has no negative result. Elu and Selu, which have an alpha too,
# are right. ONNX Runtime 1.31.0 computes the expected results.
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

values = numpy.array([-4, -2, -1, 0, 2], numpy.float32)
for operator, alpha in (("Celu", 1.0), ("Celu", 2.0), ("Celu", 0.5), ("Elu", 2.0), ("Selu", 2.0)):
    source, result = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, values.shape) for name in "xy")
    node = onnx.helper.make_node(operator, ["x"], ["y"], alpha=alpha)
    graph = onnx.helper.make_graph([node], "graph", [source], [result])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, sys.argv[1])
    session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
    runnable = tract.onnx().load(sys.argv[1]).into_model().into_runnable()
    print(f"{operator}, alpha {alpha}:")
    for name, array in (("ONNX Runtime", session.run(None, {"x": values})[0]), ("tract", runnable.run([values])[0].to_numpy())):
        print(f"  {name}:", *(f"{value:.3f}" for value in array))
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py" "$folder/model.onnx")
expected='Celu, alpha 1.0:
  ONNX Runtime: -0.982 -0.865 -0.632 0.000 2.000
  tract: -0.982 -0.865 -0.632 0.000 2.000
Celu, alpha 2.0:
  ONNX Runtime: -1.729 -1.264 -0.787 0.000 2.000
  tract: -0.865 -0.632 -0.393 0.000 2.000
Celu, alpha 0.5:
  ONNX Runtime: -0.500 -0.491 -0.432 0.000 2.000
  tract: -1.000 -0.982 -0.865 0.000 2.000
Elu, alpha 2.0:
  ONNX Runtime: -1.963 -1.729 -1.264 0.000 2.000
  tract: -1.963 -1.729 -1.264 0.000 2.000
Selu, alpha 2.0:
  ONNX Runtime: -2.063 -1.817 -1.328 0.000 2.101
  tract: -2.063 -1.817 -1.328 0.000 2.101'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
