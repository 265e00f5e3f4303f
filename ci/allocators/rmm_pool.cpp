// The pool of RMM (the headers and librmm.so of the wheel librmm) without a GPU and without a driver.
//
//     rmm_pool TRACE CAPACITY [initial=N] [maximum=N]
//
// TRACE has the lines `a ID SIZE STREAM` and `f ID`. The program prints the decision of each one, in the form of a recording.
//
// Allocation and free are templates of RMM's headers, so they are compiled here and call the CUDA functions below. Growth, splitting and reclaiming are in
// librmm.so, which calls the upstream resource below. It asks for the current device through a symbol that this program replaces, and never initializes
// its own CUDA runtime. It makes the event of the initial pool's stream, so that event is null here. Handles of events grow, as does their order in RMM.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string>

#include <rmm/cuda_device.hpp>
#if __has_include(<rmm/mr/detail/pool_memory_resource_impl.hpp>)
#include <rmm/mr/detail/pool_memory_resource_impl.hpp>
#if !defined(RMM_NAMESPACE_BEGIN) // before RMM 26.08
#define RMM_NAMESPACE_BEGIN namespace RMM_NAMESPACE {
#define RMM_NAMESPACE_END }
#endif
#else // before RMM 26.06, the whole pool is a template
#define RMM_POOL_IS_A_TEMPLATE
#if __has_include(<rmm/mr/pool_memory_resource.hpp>)
#include <rmm/mr/pool_memory_resource.hpp>
#else // before RMM 25.12
#include <rmm/mr/device/pool_memory_resource.hpp>
#endif
#endif

static const uint64_t PAGE = 2 << 20;
static std::string calls;
static uint64_t capacity = 24ull << 30, used = 0, next_address = 0x700000000000;
static int regions = 0;
static std::map<uint64_t, std::pair<uint64_t, int>> live_regions; // address -> size, number
static std::map<cudaEvent_t, int> recorded;

static void call(std::string const &text) { calls += text + "; "; }
static int number_of(cudaStream_t stream) { return (uintptr_t) stream < 4096 ? 0 : *(int *) stream; }

extern "C" {
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id) { *id = number_of(stream); return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { static uintptr_t next = 0x10000; *event = (cudaEvent_t) (next += 64); recorded[*event] = -1; return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { recorded[event] = number_of(stream); call("record " + std::to_string(number_of(stream))); return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    int other = recorded.count(event) ? recorded[event] : -1;
    call("wait " + std::to_string(number_of(stream)) + " for " + (other < 0 ? "nothing" : std::to_string(other)));
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
const char *cudaGetErrorName(cudaError_t) { return "error"; }
const char *cudaGetErrorString(cudaError_t) { return "error"; }
}

#if !defined(RMM_POOL_IS_A_TEMPLATE)
RMM_NAMESPACE_BEGIN
cuda_device_id get_current_cuda_device() { return cuda_device_id{0}; }
RMM_NAMESPACE_END
#endif

// Device memory in pages of 2 MiB. Addresses go up and are never reused.
static void *upstream_allocate(size_t size) {
    uint64_t pages = (size + PAGE - 1) / PAGE * PAGE;
    if (pages > capacity - used) { call("malloc " + std::to_string(size) + " -> oom"); throw std::bad_alloc(); }
    uint64_t address = next_address;
    next_address += pages;
    used += pages;
    live_regions[address] = {pages, regions};
    call("malloc " + std::to_string(size) + " -> " + std::to_string(regions++));
    return (void *) address;
}
static void upstream_free(void *pointer) {
    auto found = live_regions.find((uint64_t) pointer);
    used -= found->second.first;
    call("free " + std::to_string(found->second.second));
    live_regions.erase(found);
}

#if defined(RMM_POOL_IS_A_TEMPLATE)
struct Upstream final : rmm::mr::device_memory_resource {
    void *do_allocate(size_t size, rmm::cuda_stream_view) override {
        try { return upstream_allocate(size); } catch (std::bad_alloc const &) { throw rmm::out_of_memory{"no memory"}; }
    }
    void do_deallocate(void *pointer, size_t, rmm::cuda_stream_view) noexcept override { upstream_free(pointer); }
};
static Upstream upstream;
using Pool = rmm::mr::pool_memory_resource<Upstream>;
static Pool *make_pool(size_t initial, std::optional<size_t> maximum) { return new Pool(&upstream, initial, maximum); }
// Before RMM 25.12, the stream is the last argument.
static void *allocate(auto *pool, size_t size, cudaStream_t stream) {
    if constexpr (requires { pool->allocate(rmm::cuda_stream_view{stream}, size); }) return pool->allocate(rmm::cuda_stream_view{stream}, size);
    else return pool->allocate(size, rmm::cuda_stream_view{stream});
}
static void deallocate(auto *pool, void *pointer, size_t size, cudaStream_t stream) {
    if constexpr (requires { pool->deallocate(rmm::cuda_stream_view{stream}, pointer, size); }) pool->deallocate(rmm::cuda_stream_view{stream}, pointer, size);
    else pool->deallocate(pointer, size, rmm::cuda_stream_view{stream});
}
#else
struct Upstream {
    void *allocate_sync(size_t size, size_t) { return upstream_allocate(size); }
    void deallocate_sync(void *pointer, size_t, size_t) noexcept { upstream_free(pointer); }
    void *allocate(cuda::stream_ref, size_t size, size_t) { return upstream_allocate(size); }
    void deallocate(cuda::stream_ref, void *pointer, size_t, size_t) noexcept { upstream_free(pointer); }
    bool operator==(Upstream const &) const noexcept { return true; }
    bool operator!=(Upstream const &) const noexcept { return false; }
    friend void get_property(Upstream const &, cuda::mr::device_accessible) noexcept {}
};
using Pool = rmm::mr::detail::pool_memory_resource_impl;
static Pool *make_pool(size_t initial, std::optional<size_t> maximum) { return new Pool(Upstream{}, initial, maximum); }
static void *allocate(Pool *pool, size_t size, cudaStream_t stream) { return pool->allocate(cuda::stream_ref{stream}, size, 256); }
static void deallocate(Pool *pool, void *pointer, size_t size, cudaStream_t stream) { pool->deallocate(cuda::stream_ref{stream}, pointer, size, 256); }
#endif

int main(int argc, char **argv) {
    capacity = strtoull(argv[2], nullptr, 10);
    size_t initial = 0;
    std::optional<size_t> maximum;
    for (int i = 3; i < argc; i++) {
        if (!strncmp(argv[i], "initial=", 8)) initial = strtoull(argv[i] + 8, nullptr, 10);
        if (!strncmp(argv[i], "maximum=", 8)) maximum = strtoull(argv[i] + 8, nullptr, 10);
    }
    auto *pool = make_pool(initial, maximum);
    std::map<std::string, std::pair<void *, std::pair<size_t, int>>> live;
    std::map<int, cudaStream_t> streams{{0, nullptr}};
    std::ifstream trace(argv[1]);
    for (std::string line; std::getline(trace, line);) {
        std::istringstream words(line);
        std::string kind, id, result;
        size_t size = 0;
        int number = 0;
        words >> kind >> id >> size >> number;
        if (kind == "a") {
            if (!streams.count(number)) {
                streams[number] = (cudaStream_t) malloc(64);
                *(int *) streams[number] = number;
            }
            try {
                void *pointer = allocate(pool, size, streams[number]);
                live[id] = {pointer, {size, number}};
                auto region = std::prev(live_regions.upper_bound((uint64_t) pointer));
                result = "at " + std::to_string(region->second.second) + "+" + std::to_string((uint64_t) pointer - region->first) + " " + std::to_string((size + 255) / 256 * 256);
            } catch (std::exception const &) {
                result = "oom";
            }
        } else if (kind == "f") {
            auto found = live.find(id);
            if (found == live.end()) {
                result = "ignored";
            } else {
                auto [pointer, about] = found->second;
                deallocate(pool, pointer, about.first, streams[about.second]);
                live.erase(found);
                result = "freed";
            }
        } else continue;
        printf("%s%s\n", calls.c_str(), result.c_str());
        calls.clear();
    }
    fflush(stdout);
    _Exit(0);
}
