# Two processes share a GPU of 1 GiB, with the functions of CUDA and NVML only. Memory of one process is not available to the other until it is killed.
# Without arguments this is the first process, which starts the second and prints the figures.
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


def nvml_figures():
    """Used memory of the device, and the memory of each process."""
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
used, held = nvml_figures()
print("free", free(), "used", used, "held", held[os.getpid()], held[second.pid])
second.kill()
while open("/proc/%d/stat" % second.pid).read().rsplit(")")[1].split()[0] != "Z":
    pass
print("killed: free", free(), "first", malloc(600), "used", *nvml_figures()[0:1])
second.wait()
child = os.fork()
if child == 0:
    # A child cannot use the context of its parent, and its calls do not affect other processes.
    os._exit(malloc(100))
print("forked:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "free", free())
