# Two processes on one GPU of 1 GiB, by the functions of CUDA and NVML alone: what one holds the other cannot have, until that one is killed.
# Without arguments it is the first; it starts the second, and prints what it sees.
import ctypes
import os
import subprocess
import sys

MIB = 1 << 20
cuda = ctypes.CDLL("libcudart.so.13")
nvml = ctypes.CDLL("libnvidia-ml.so.1")
assert nvml.nvmlInit_v2() == 0


def malloc(mib):
    pointer = ctypes.c_void_p()
    return cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(mib * MIB))


def free():
    left, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert cuda.cudaMemGetInfo(ctypes.byref(left), ctypes.byref(total)) == 0
    return left.value // MIB


def told_by_nvml():
    """Device used, and what each process holds."""
    handle, memory = ctypes.c_void_p(), (ctypes.c_uint64 * 3)()
    assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) == 0
    assert nvml.nvmlDeviceGetMemoryInfo(handle, memory) == 0
    count, processes = ctypes.c_uint(8), (ctypes.c_uint64 * 24)()
    assert nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), processes) == 0
    held = {processes[3 * index] & 0xFFFFFFFF: processes[3 * index + 1] // MIB for index in range(count.value)}
    return memory[2] // MIB, held


if len(sys.argv) > 1:
    print(malloc(600), flush=True)
    sys.stdin.read()
    os._exit(0)

import torch  # noqa: F401, E402: a program without torch leaves no record

second = subprocess.Popen([sys.executable, __file__, "second"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print("second", second.stdout.readline().strip(), "first", malloc(600), malloc(100))
used, held = told_by_nvml()
print("free", free(), "used", used, "held", held[os.getpid()], held[second.pid])
second.kill()
while open("/proc/%d/stat" % second.pid).read().rsplit(")")[1].split()[0] != "Z":
    pass
print("killed: free", free(), "first", malloc(600), "used", *told_by_nvml()[0:1])
second.wait()
child = os.fork()
if child == 0:
    # It has its parent's context, which cannot be used in it; what it does changes nothing for others.
    os._exit(malloc(100))
print("forked:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "free", free())
