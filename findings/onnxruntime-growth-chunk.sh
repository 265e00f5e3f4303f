#!/usr/bin/env bash
# onnxruntime 1.31.0 (https://pypi.org/project/onnxruntime) accepts any `initial_growth_chunk_size_bytes` of its memory arena, but fails requests if the
# size is not a multiple of 256.
#
# The setting is the size of the first region after the arena has shrunk (run option `memory.enable_memory_arena_shrinkage`). With 40,000,128 bytes,
# nothing is wrong until then. After each shrink, the first request that needs a region fails with the text of an internal check. The region is
# allocated before the check and never released, so each failure loses it. The next request takes twice the size, which is a multiple of 256 here,
# and fits. With 40,000,256 bytes, no request fails. The CPU and the CUDA execution provider use the same arena.
#
# Seen on 29 November 2026 on x86-64 Linux, without a GPU: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, PyPI, and 2 GiB of memory.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.0 numpy==2.3.5
cat >"$folder/program.py" <<'PYTHON'
import sys

import numpy
import onnxruntime

MIB, ROUNDS = 1 << 20, 10


def field(number, value):
    if isinstance(value, int):
        return bytes([number << 3, value])
    value = value.encode() if isinstance(value, str) else value
    return bytes([number << 3 | 2, len(value)]) + value


def tensor(name, element):
    return field(1, name) + field(2, field(1, field(1, element) + field(2, field(1, field(2, "n")))))


# A model of one node, which creates a tensor of the given size.
node = field(1, "shape") + field(2, "filled") + field(4, "ConstantOfShape")
graph = field(1, node) + field(2, "graph") + field(11, tensor("shape", 7)) + field(12, tensor("filled", 1))
model = field(1, 8) + field(7, graph) + field(8, field(2, 13))
growth = int(sys.argv[1])
memory = onnxruntime.OrtMemoryInfo("Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT)
onnxruntime.create_and_register_allocator(memory, onnxruntime.OrtArenaCfg({"initial_growth_chunk_size_bytes": growth}))
options = onnxruntime.SessionOptions()
options.add_session_config_entry("session.use_env_allocators", "1")
options.intra_op_num_threads = 1
options.log_severity_level = 4
session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(bytes, shrinks=False):
    shape = onnxruntime.OrtValue.ortvalue_from_numpy(numpy.array([bytes // 4]))
    options = onnxruntime.RunOptions()
    if shrinks:
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    try:
        session.run_with_ort_values(None, {"shape": shape}, options)
        return "fits"
    except Exception as error:
        return "fails" if "memory_size % kMinAllocationSize" in str(error) else str(error)


def address_space():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) // 1024


# The first region stays, so it is a small one.
run(4096)
print(f"{growth}: before a shrink 2 MiB", run(2 * MIB))
results = []
for round in range(ROUNDS):
    run(4096, shrinks=True)
    results.append((run(2 * MIB), run(2 * MIB)))
    if round == 0:
        first = address_space()
lost = (address_space() - first) // (growth // MIB)
print(f"{growth}: after a shrink 2 MiB", *sorted(set(results)))
print(f"{growth}: regions lost in {ROUNDS - 1} rounds: {lost}")
PYTHON
seen=$(for growth in 40000128 40000256; do "$folder/venv/bin/python" "$folder/program.py" "$growth"; done)
expected="40000128: before a shrink 2 MiB fits
40000128: after a shrink 2 MiB ('fails', 'fits')
40000128: regions lost in 9 rounds: 9
40000256: before a shrink 2 MiB fits
40000256: after a shrink 2 MiB ('fits', 'fits')
40000256: regions lost in 9 rounds: 0"
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
