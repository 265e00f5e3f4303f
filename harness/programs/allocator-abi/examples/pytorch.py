"""Uses an allocator of libharness_allocator_abi.so in PyTorch: for one pool or for the whole program.

    python pytorch.py libharness_allocator_abi.so            # for some of the program's tensors: MemPool
    python pytorch.py libharness_allocator_abi.so --all      # for the whole program: CUDAPluggableAllocator

Without a GPU: harness exec --memory 8GiB -- python pytorch.py ...
"""

import argparse
import ctypes
import json

import torch

arguments = argparse.ArgumentParser()
arguments.add_argument("path", metavar="library")
arguments.add_argument("--allocator", default="harness_caching", choices=["harness_caching", "harness_bfc", "harness_rmm_pool"])
arguments.add_argument("--all", action="store_true")
arguments = arguments.parse_args()

prefix = arguments.allocator
functions = ctypes.CDLL(arguments.path)
allocator = torch.cuda.memory.CUDAPluggableAllocator(arguments.path, prefix + "_malloc", prefix + "_free")


def stats(device=0):
    """The statistics. torch.cuda.memory_stats() has none for a pluggable allocator."""
    function = getattr(functions, prefix + "_stats")
    function.restype = ctypes.c_size_t
    text = ctypes.create_string_buffer(1 << 16)
    function(device, text, ctypes.c_size_t(len(text)))
    return json.loads(text.value)


def address_of(name):
    return ctypes.cast(getattr(functions, prefix + name), ctypes.c_void_p).value


if arguments.all:
    # Call it before the first allocation. PyTorch does not check for null here: a tensor without memory has the address 0.
    torch.cuda.memory.change_current_allocator(allocator)
    allocator.allocator().set_record_stream_fn(address_of("_record_stream"))
    weights = torch.zeros(1024, 1024, device="cuda")
else:
    # PyTorch's allocator takes its segments from ours and raises torch.OutOfMemoryError if ours returns null.
    pool = torch.cuda.MemPool(allocator.allocator())
    with torch.cuda.use_mem_pool(pool):
        weights = torch.zeros(1024, 1024, device="cuda")
        try:
            torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            print("out of memory is torch.OutOfMemoryError")

for name in ["allocated_bytes.all.current", "reserved_bytes.all.current", "num_device_alloc"]:
    print(name, stats()[name])
