#!/usr/bin/env bash
# The memory pool of librmm-cu13 26.10.0 (https://pypi.org/project/librmm-cu13) can take more than its maximum. From then on, requests fail
# although the whole pool is free.
#
# The maximum has to be a multiple of 256 B. If the device refuses a growth, the pool asks for half of it, which is not rounded. So the
# pool can have a size that is no multiple of 256 B. The rest up to the maximum is rounded up to 256 B, and a request of that size exceeds
# the maximum. A pool at its maximum releases free regions for a larger request; a pool beyond it does not.
#
# The program below gives the pool a device with 40 MiB, later with more. With a maximum of 100 MiB, all sizes are multiples of 256 B.
# With 256 B more, the pool holds 64 B more than its maximum. Both pools are then empty, and get a request for 90 MiB.
#
# Seen on 29 November 2026 on x86-64 Linux, without a GPU: the lines in `expected` below. The program replaces the functions of CUDA that
# the pool calls.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs g++ with C++20, python3 with pip, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" \
    librmm-cu13==26.10.0 rapids-logger==0.3.0 nvidia-cuda-runtime==13.5.37 nvidia-cuda-crt==13.5.37
cat >"$folder/pool.cpp" <<'CPP'
#include <cstdio>
#include <rmm/cuda_device.hpp>
#include <rmm/mr/detail/pool_memory_resource_impl.hpp>

extern "C" {
cudaError_t cudaStreamGetId(cudaStream_t, unsigned long long* id) { *id = 0; return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  static char events[64];
  static int next;
  *event = (cudaEvent_t)&events[next++];
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
char const* cudaGetErrorName(cudaError_t) { return "error"; }
char const* cudaGetErrorString(cudaError_t) { return "error"; }
}
RMM_NAMESPACE_BEGIN
cuda_device_id get_current_cuda_device() { return cuda_device_id{0}; }
RMM_NAMESPACE_END

constexpr size_t MiB = 1 << 20;
size_t device_free, held;

// A device whose addresses are only numbers.
struct Device {
  void* allocate_sync(size_t size, size_t) {
    static size_t next = size_t{7} << 44;
    if (size > device_free) throw std::bad_alloc();
    device_free -= size;
    held += size;
    return (void*)(next += size_t{1} << 30);
  }
  void deallocate_sync(void*, size_t size, size_t) noexcept {
    device_free += size;
    held -= size;
  }
  void* allocate(cuda::stream_ref, size_t size, size_t alignment) { return allocate_sync(size, alignment); }
  void deallocate(cuda::stream_ref, void* pointer, size_t size, size_t alignment) noexcept {
    deallocate_sync(pointer, size, alignment);
  }
  bool operator==(Device const&) const noexcept { return true; }
  friend void get_property(Device const&, cuda::mr::device_accessible) noexcept {}
};

void try_maximum(size_t maximum) {
  cuda::stream_ref stream{cudaStream_t{}};
  held = 0;
  rmm::mr::detail::pool_memory_resource_impl pool(Device{}, 0, maximum);
  device_free = 40 * MiB;
  void* first = pool.allocate(stream, MiB, 256);
  printf("maximum %zu: first region %zu", maximum, held);
  device_free = 1000 * MiB;
  size_t rest = (maximum - held + 255) / 256 * 256;
  void* second = pool.allocate(stream, rest, 256);
  printf(", then %zu in all", held);
  pool.deallocate(stream, first, MiB, 256);
  pool.deallocate(stream, second, rest, 256);
  try {
    pool.allocate(stream, 90 * MiB, 256);
    printf("; 90 MiB fit\n");
  } catch (std::exception const&) {
    printf("; 90 MiB do not fit\n");
  }
}

int main() {
  try_maximum(100 * MiB);
  try_maximum(100 * MiB + 256);
  fflush(stdout);
  _Exit(0);
}
CPP
rmm=$folder/librmm logger=$folder/rapids_logger
g++ -std=c++20 -O1 -w -DNDEBUG -rdynamic -o "$folder/pool" "$folder/pool.cpp" \
    -I"$rmm/include" -I"$rmm/include/rapids" -I"$rmm/include/rapids/libcudacxx" -I"$logger/include" -I"$folder/nvidia/cu13/include" \
    "$rmm/lib64/librmm.so" "$logger/lib64/librapids_logger.so" -Wl,-rpath,"$rmm/lib64" -Wl,-rpath,"$logger/lib64"
seen=$("$folder/pool" 2>/dev/null)
expected='maximum 104857600: first region 26214400, then 104857600 in all; 90 MiB fit
maximum 104857856: first region 26214464, then 104857920 in all; 90 MiB do not fit'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
