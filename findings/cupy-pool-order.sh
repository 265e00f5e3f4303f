#!/usr/bin/env bash
# The memory pool of cupy-cuda13x 14.2.0 (https://pypi.org/project/cupy-cuda13x) chooses between free blocks of one size by addresses of
# the host. So a deterministic program can get other device addresses in each run.
#
# The pool keeps free blocks in a set that is ordered by size, then by the address of the Python object that describes the block. The
# order of the blocks on the device and the order in which they were freed do not matter. Tools that compare addresses between two runs
# of a CuPy program, or replay one, must expect this.
#
# The script needs no GPU: it replaces the two functions by which the pool asks for the current device and stream, and gives it
# addresses that are only numbers.
#
# Seen on 29 November 2026 on x86-64 Linux: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check cupy-cuda13x==14.2.0 numpy==2.3.5
cat >"$folder/program.py" <<'PYTHON'
import ctypes
import importlib
import random
import sys

api = ctypes.pythonapi
api.PyCapsule_New.restype, api.PyCapsule_New.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
kept = []


class WithoutDriver:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "cupy.cuda.memory":
            replace("cupy.cuda.device", "get_device_id", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda skip_dispatch: 0))
            replace("cupy.cuda.stream", "get_current_stream_ptr", ctypes.CFUNCTYPE(ctypes.c_ssize_t)(lambda: 0))


def replace(module, name, function):
    functions = importlib.import_module(module).__pyx_capi__
    signature = ctypes.create_string_buffer(api.PyCapsule_GetName(functions[name]))
    kept.extend([function, signature])
    functions[name] = api.PyCapsule_New(ctypes.cast(function, ctypes.c_void_p), signature, None)


sys.meta_path.insert(0, WithoutDriver)
from cupy.cuda import memory

COUNT, MIB = 400, 1 << 20
following = iter(range(1 << 40, 1 << 41, MIB))
pool = memory.SingleDeviceMemoryPool(memory.PythonFunctionAllocator(lambda size, device: next(following), lambda address, device: None).malloc)
generator = random.Random(1)
blocks = []
for _ in range(COUNT):
    # Other objects of the program, so that addresses on the host are as irregular as usual.
    kept.append([bytearray(generator.randrange(1000)) for _ in range(generator.randrange(20))])
    blocks.append(pool.malloc(MIB))
    if generator.random() < 0.5:
        del kept[generator.randrange(2, len(kept))]
generator.shuffle(blocks)
freed = [block.ptr for block in blocks]
while blocks:
    blocks.pop(0)
host = [block.ptr() for _, block in sorted(pool._debug_arena_get_index(0), key=lambda entry: id(entry[1]))]
reused = []
for _ in range(COUNT):
    blocks.append(pool.malloc(MIB))
    reused.append(blocks[-1].ptr)
for order, expected in [("addresses of Python objects", host), ("addresses on the device", sorted(freed)), ("first freed first", freed), ("last freed first", freed[::-1])]:
    print(f"{order}: {'yes' if reused == expected else 'no'}")
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py")
expected='addresses of Python objects: yes
addresses on the device: no
first freed first: no
last freed first: no'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
