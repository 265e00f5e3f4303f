// The real allocators of TensorFlow and RMM as shared libraries that `harness bench` times beside ours: one of BFC, POOL, ARENA and BINNING is defined.
// Memory comes from the CUDA driver. RMM's events do nothing, so they take no time.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <dlfcn.h>
#include <memory>
#include <sys/types.h>

// By name: RMM's headers declare some of them.
template <typename... Arguments> static int driver(const char *name, Arguments... arguments) {
    return ((int (*)(Arguments...)) dlsym(RTLD_DEFAULT, name))(arguments...);
}
static size_t total() {
    size_t free, all = 0;
    driver("cuMemGetInfo_v2", &free, &all);
    return all;
}
static void begin() {
    void *context;
    driver("cuInit", 0u);
    driver("cuDevicePrimaryCtxRetain", &context, 0);
    driver("cuCtxSetCurrent", context);
}
static void *device_allocate(size_t size) {
    void *memory = nullptr;
    return driver("cuMemAlloc_v2", &memory, size) ? nullptr : memory;
}
static void device_free(void *memory) { driver("cuMemFree_v2", memory); }

#ifdef BFC
#include "xla/tsl/framework/bfc_allocator.h"

struct Sub : tsl::SubAllocator {
    Sub() : tsl::SubAllocator({}, {}) {}
    void *Alloc(size_t, size_t size, size_t *received) override {
        void *memory = device_allocate(size);
        *received = memory ? size : 0;
        return memory;
    }
    void Free(void *memory, size_t) override { device_free(memory); }
    bool SupportsCoalescing() const override { return false; }
};
static tsl::BFCAllocator &allocator() {
    static auto *made = [] {
        begin();
        tsl::BFCAllocator::Options options;
        options.allow_growth = true;
        options.allow_retry_on_failure = false;
        return new tsl::BFCAllocator(std::make_unique<Sub>(), total(), "bfc", options);
    }();
    return *made;
}
extern "C" void *real_malloc(ssize_t size, int, void *) { return allocator().AllocateRaw(1, size); }
extern "C" void real_free(void *memory, ssize_t, int, void *) { allocator().DeallocateRaw(memory); }
#else
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/binning_memory_resource.hpp>
#include <rmm/mr/fixed_size_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>

extern "C" {
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id) { *id = (uintptr_t) stream; return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { static uintptr_t next = 0x10000; *event = (cudaEvent_t) (next += 64); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
const char *cudaGetErrorName(cudaError_t) { return "error"; }
const char *cudaGetErrorString(cudaError_t) { return "error"; }
}
RMM_NAMESPACE_BEGIN
cuda_device_id get_current_cuda_device() { return cuda_device_id{0}; }
std::pair<size_t, size_t> available_device_memory() { return {total(), total()}; }
RMM_NAMESPACE_END

struct Upstream {
    void *allocate_sync(size_t size, size_t) {
        void *memory = device_allocate(size);
        if (!memory) throw std::bad_alloc();
        return memory;
    }
    void deallocate_sync(void *memory, size_t, size_t) noexcept { device_free(memory); }
    void *allocate(cuda::stream_ref, size_t size, size_t) { return allocate_sync(size, 256); }
    void deallocate(cuda::stream_ref, void *memory, size_t size, size_t) noexcept { deallocate_sync(memory, size, 256); }
    bool operator==(Upstream const &) const noexcept { return true; }
    bool operator!=(Upstream const &) const noexcept { return false; }
    friend void get_property(Upstream const &, cuda::mr::device_accessible) noexcept {}
};
using Pool = rmm::mr::pool_memory_resource;
static auto make() {
    begin();
#if defined(POOL)
    return Pool{Upstream{}, 0, std::nullopt};
#elif defined(ARENA)
    return rmm::mr::arena_memory_resource{Upstream{}, total() / 2, false};
#else
    return rmm::mr::binning_memory_resource{Pool{Upstream{}, 0, std::nullopt}, 18, 22};
#endif
}
static auto &allocator() {
    static auto *made = new auto(make());
    return *made;
}
extern "C" void *real_malloc(ssize_t size, int, void *stream) {
    try { return allocator().allocate(cuda::stream_ref{(cudaStream_t) stream}, size, 256); } catch (std::exception const &) { return nullptr; }
}
extern "C" void real_free(void *memory, ssize_t size, int, void *stream) { allocator().deallocate(cuda::stream_ref{(cudaStream_t) stream}, memory, size, 256); }
#endif
