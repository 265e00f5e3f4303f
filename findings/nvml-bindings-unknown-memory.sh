#!/usr/bin/env bash
# cuda-core 1.2.2 (https://pypi.org/project/cuda-core) reports 16 EiB for a process whose GPU memory is unknown. Of nvidia-ml-py 13.615.71
# (https://pypi.org/project/nvidia-ml-py), one function returns None for such a process, and two fail with a TypeError.
#
# NVML returns NVML_VALUE_NOT_AVAILABLE, which is 2^64 - 1, if it does not know the memory of a process, for example with the driver model WDDM.
# `Device.compute_running_processes` of cuda-core declares an integer (cuda/core/cu13/system/_device.pyi, line 948) and returns 2^64 - 1 as bytes.
# So does cuda-bindings 13.5.0, which it uses. A sum over processes is then wrong, without an error.
#
# `nvmlDeviceGetComputeRunningProcesses` of nvidia-ml-py returns None. `nvmlDeviceGetRunningProcessDetailList` and `nvmlDeviceGetAccountingStats` assign
# None to an integer of a C structure, which raises the TypeError (pynvml.py, lines 4396 and 4714).
#
# The script needs no GPU: it compiles a library that replaces NVML and has one such process.
#
# Seen on 30 November 2026 on x86-64 Linux, without a GPU, also with cuda-core 1.0.0, cuda-bindings 13.2.0 and nvidia-ml-py 13.580.65: the lines in
# `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs a C compiler, python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check cuda-core==1.2.2 cuda-bindings==13.5.0 nvidia-ml-py==13.615.71 nvidia-nvml-dev==13.5.37
cat >"$folder/nvml.c" <<'C'
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

nvmlReturn_t nvmlInit_v2(void) { return NVML_SUCCESS; }
nvmlReturn_t nvmlInitWithFlags(unsigned flags) { return NVML_SUCCESS; }
nvmlReturn_t nvmlShutdown(void) { return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned* count) { *count = 1; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t* device) { *device = (nvmlDevice_t)1; return NVML_SUCCESS; }

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned* count, nvmlProcessInfo_t* processes) {
  unsigned space = *count;
  *count = 1;
  if (space == 0) return NVML_ERROR_INSUFFICIENT_SIZE;
  processes[0] = (nvmlProcessInfo_t){.pid = 7, .usedGpuMemory = NVML_VALUE_NOT_AVAILABLE};
  return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t* list) {
  unsigned space = list->numProcArrayEntries;
  list->numProcArrayEntries = 1;
  if (space == 0) return NVML_ERROR_INSUFFICIENT_SIZE;
  list->procArray[0] = (nvmlProcessDetail_v1_t){.pid = 7, .usedGpuMemory = NVML_VALUE_NOT_AVAILABLE};
  return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned pid, nvmlAccountingStats_t* stats) {
  *stats = (nvmlAccountingStats_t){.maxMemoryUsage = NVML_VALUE_NOT_AVAILABLE};
  return NVML_SUCCESS;
}
C
mkdir "$folder/lib"
cc -shared -fPIC -w -o "$folder/lib/libnvidia-ml.so.1" "$folder/nvml.c" -I"$(dirname "$(find "$folder/venv" -name nvml.h)")"
cat >"$folder/program.py" <<'PYTHON'
import pynvml
from cuda.bindings import nvml
from cuda.core import system

pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)


def show(name, read):
    try:
        print(f"{name}: {read()}")
    except TypeError:
        print(f"{name}: TypeError")


show("cuda-core, processes", lambda: system.Device(index=0).compute_running_processes[0].used_gpu_memory)
show("cuda-bindings, processes", lambda: nvml.device_get_compute_running_processes_v3(nvml.device_get_handle_by_index_v2(0)).used_gpu_memory)
show("nvidia-ml-py, processes", lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(device)[0].usedGpuMemory)
show("nvidia-ml-py, details", lambda: pynvml.nvmlDeviceGetRunningProcessDetailList(device, pynvml.nvmlProcessDetailList_v1, 0)[0].usedGpuMemory)
show("nvidia-ml-py, accounting", lambda: pynvml.nvmlDeviceGetAccountingStats(device, 7).maxMemoryUsage)
PYTHON
seen=$(LD_LIBRARY_PATH=$folder/lib "$folder/venv/bin/python" "$folder/program.py")
expected='cuda-core, processes: 18446744073709551615
cuda-bindings, processes: 18446744073709551615
nvidia-ml-py, processes: None
nvidia-ml-py, details: TypeError
nvidia-ml-py, accounting: TypeError'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
