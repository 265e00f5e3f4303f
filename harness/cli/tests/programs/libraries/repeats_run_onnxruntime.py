# Runs a model on two batches. Its mistake: after an out-of-memory error it requests the same memory again, up to five times.
import numpy
import onnxruntime
from onnx import TensorProto, helper

value = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "n"])
graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "g", [value("a"), value("b")], [value("c")])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CUDAExecutionProvider"])
for size in (512, 4096):
    for attempt in range(5):
        try:
            session.run(None, dict.fromkeys("ab", numpy.zeros((size, size), numpy.float32)))
            break
        except Exception as error:
            assert "Failed to allocate memory" in str(error), error
            print("failed", size)
