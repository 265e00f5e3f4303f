#!/usr/bin/env bash
# The bins of librmm-cu13 26.10.0 (https://pypi.org/project/librmm-cu13) take 992 MiB before the first request, and a request of 4 MiB can
# fail although the device has 500 MiB free.
#
# `binning_memory_resource(upstream, 18, 22)`, the example of RMM's documentation, has bins of 256 KiB to 4 MiB. Each is a
# `fixed_size_memory_resource`, which takes 128 blocks from the upstream when it is made. The constructor of the bins has no argument for that
# number. A bin without a free block takes 128 more. If the upstream cannot give them, the request fails: the bin does not ask for fewer
# blocks, and neither a larger bin nor the upstream serves the request. A request of one byte more than 4 MiB goes to the upstream and fits.
#
# The program below gives the bins a device of 1500 MiB, whose memory is only counted, and then takes blocks of 4 MiB.
#
# Seen on 30 November 2026 on x86-64 Linux, without a GPU: the lines in `expected` below. The program replaces the functions of CUDA that
# the bins call.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs g++ with C++20, python3 with pip, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" \
    librmm-cu13==26.10.0 rapids-logger==0.3.0 nvidia-cuda-runtime==13.5.37 nvidia-cuda-crt==13.5.37
cat >"$folder/bins.cpp" <<'CPP'
#include <cstdio>
#include <rmm/mr/binning_memory_resource.hpp>

extern "C" {
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
char const* cudaGetErrorName(cudaError_t) { return "error"; }
char const* cudaGetErrorString(cudaError_t) { return "error"; }
}
RMM_NAMESPACE_BEGIN
cuda_device_id get_current_cuda_device() { return cuda_device_id{0}; }
RMM_NAMESPACE_END

constexpr size_t MiB = 1 << 20;
size_t device_free = 1500 * MiB;

// A device whose addresses are only numbers.
struct Device {
  void* allocate_sync(size_t size, size_t) {
    static size_t next = size_t{7} << 44;
    if (size > device_free) throw std::bad_alloc();
    device_free -= size;
    return (void*)(next += size_t{1} << 30);
  }
  void deallocate_sync(void*, size_t size, size_t) noexcept { device_free += size; }
  void* allocate(cuda::stream_ref, size_t size, size_t alignment) { return allocate_sync(size, alignment); }
  void deallocate(cuda::stream_ref, void* pointer, size_t size, size_t alignment) noexcept {
    deallocate_sync(pointer, size, alignment);
  }
  bool operator==(Device const&) const noexcept { return true; }
  friend void get_property(Device const&, cuda::mr::device_accessible) noexcept {}
};

bool fits(rmm::mr::binning_memory_resource& bins, size_t size) {
  try {
    (void)bins.allocate(cuda::stream_ref{cudaStream_t{}}, size, 256);
    return true;
  } catch (std::exception const&) {
    return false;
  }
}

int main() {
  size_t all = device_free;
  rmm::mr::binning_memory_resource bins(Device{}, 18, 22);
  printf("before the first request: %zu MiB\n", (all - device_free) / MiB);
  int blocks = 0;
  while (fits(bins, 4 * MiB)) blocks++;
  printf("blocks of 4 MiB: %d, then none, with %zu MiB free on the device\n", blocks, device_free / MiB);
  printf("one byte more %s\n", fits(bins, 4 * MiB + 1) ? "fits" : "does not fit");
  fflush(stdout);
  _Exit(0);
}
CPP
rmm=$folder/librmm logger=$folder/rapids_logger
g++ -std=c++20 -O1 -w -DNDEBUG -rdynamic -o "$folder/bins" "$folder/bins.cpp" \
    -I"$rmm/include" -I"$rmm/include/rapids" -I"$rmm/include/rapids/libcudacxx" -I"$logger/include" -I"$folder/nvidia/cu13/include" \
    -Wl,--no-as-needed "$rmm/lib64/librmm.so" "$logger/lib64/librapids_logger.so" -Wl,-rpath,"$rmm/lib64" -Wl,-rpath,"$logger/lib64" -ldl -lrt -lpthread
seen=$("$folder/bins" 2>/dev/null)
expected='before the first request: 992 MiB
blocks of 4 MiB: 128, then none, with 508 MiB free on the device
one byte more fits'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
