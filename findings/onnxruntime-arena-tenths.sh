#!/usr/bin/env bash
# The memory arena of onnxruntime 1.31.0 (https://pypi.org/project/onnxruntime) can fail a request although the memory is free.
#
# If the system refuses a new region, the arena tries 0.9 of its size, 0.9 of that, and so on, down to the request. It does not try the
# request itself. A request for 700 MiB is tried with 1024, 922, 829 and 746 MiB; the next size, 672 MiB, is too small. So it fails if
# 740 MiB are free. With `kSameAsRequested`, the same request succeeds. The CPU and the CUDA execution provider use the same arena. The
# CPU's is easier to limit.
#
# The script limits the address space of a process. First numpy allocates as much as the request, then the arena does.
#
# Seen on 29 November 2026 on x86-64 Linux, without a GPU: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, PyPI, and 1 GiB of memory.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.0 numpy==2.3.5
cat >"$folder/program.py" <<'PYTHON'
import resource
import sys

import numpy
import onnxruntime

MIB = 1 << 20


def field(number, value):
    if isinstance(value, int):
        return bytes([number << 3, value])
    value = value.encode() if isinstance(value, str) else value
    return bytes([number << 3 | 2, len(value)]) + value


def tensor(name, element):
    return field(1, name) + field(2, field(1, field(1, element) + field(2, field(1, field(2, "n")))))


node = field(1, "shape") + field(2, "filled") + field(4, "ConstantOfShape")
graph = field(1, node) + field(2, "graph") + field(11, tensor("shape", 7)) + field(12, tensor("filled", 1))
model = field(1, 8) + field(7, graph) + field(8, field(2, 13))
strategy = int(sys.argv[1])
memory = onnxruntime.OrtMemoryInfo("Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT)
onnxruntime.create_and_register_allocator(memory, onnxruntime.OrtArenaCfg({"arena_extend_strategy": strategy}))
options = onnxruntime.SessionOptions()
options.add_session_config_entry("session.use_env_allocators", "1")
options.intra_op_num_threads = 1
options.log_severity_level = 4
session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(bytes):
    shape = onnxruntime.OrtValue.ortvalue_from_numpy(numpy.array([bytes // 4]))
    return session.run_with_ort_values(None, {"shape": shape})


run(16)
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (used + 740 * MIB, -1))
array = numpy.empty(700 * MIB, numpy.uint8)
del array
print("numpy: 700 MiB fit")
try:
    run(700 * MIB)
    print(f"arena with strategy {strategy}: 700 MiB fit")
except Exception as error:
    refused = "Failed to allocate memory for requested buffer" in str(error)
    print(f"arena with strategy {strategy}: 700 MiB fail" if refused else error)
PYTHON
seen=$(for strategy in 0 1; do "$folder/venv/bin/python" "$folder/program.py" "$strategy"; done)
expected='numpy: 700 MiB fit
arena with strategy 0: 700 MiB fail
numpy: 700 MiB fit
arena with strategy 1: 700 MiB fit'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
