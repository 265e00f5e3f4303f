"""Runs a Python program, and prints the memory that it allocated: python ci/record.py [-m MODULE | -c CODE | FILE] [ARGUMENT]...

Prints the peaks of allocated and reserved bytes, the number of allocations, and a checksum of their sizes in order. Works on a GPU and on a simulated one:

    harness exec --gpu h200-141 --values cpu -- python ci/record.py -m trl.scripts.sft --model_name_or_path tiny --dataset_name data-sft
"""
import atexit
import os
import random
import runpy
import sys
import types
import zlib

import numpy
import torch

MOST_EVENTS = 20_000_000


def begin():
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)
    torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, context=None)


def figures():
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    sizes = [event["size"] for event in events if event["action"] == "alloc"]
    print("figure allocated", torch.cuda.max_memory_allocated())
    print("figure reserved", torch.cuda.max_memory_reserved())
    print("figure allocations", len(sizes))
    print("figure checksum", zlib.crc32(repr(sizes).encode()), flush=True)


def main(kind, *arguments):
    begin()
    process = os.getpid()
    atexit.register(lambda: figures() if os.getpid() == process else None)
    if kind == "-m":
        sys.argv, sys.path[0] = list(arguments), ""
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[1:]], ""
        sys.modules["__main__"] = program = types.ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), program.__dict__)
    else:
        sys.argv, sys.path[0] = [kind, *arguments], os.path.dirname(os.path.abspath(kind))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
