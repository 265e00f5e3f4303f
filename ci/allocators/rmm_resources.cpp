// RMM's arena, bins, fixed-size pool and adaptors (the headers and librmm.so of the wheel librmm) without a GPU and without a driver.
//
//     rmm_resources RESOURCE TRACE CAPACITY [NAME=N…]
//
// TRACE has the lines `a ID SIZE STREAM` and `f ID`. The program prints the decision of each one, in the form of a recording.
//
// The templates of RMM's headers are compiled here and call the CUDA functions below. librmm.so has its own CUDA runtime, which is never initialized.
// Those of its functions that the resources need begin here with a jump to the ones below.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <sys/mman.h>

#include <rmm/mr/aligned_resource_adaptor.hpp>
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/binning_memory_resource.hpp>
#include <rmm/mr/fixed_size_memory_resource.hpp>
#include <rmm/mr/limiting_resource_adaptor.hpp>
#include <rmm/mr/pool_memory_resource.hpp>

static const uint64_t PAGE = 2 << 20;
static std::string calls;
static uint64_t capacity = 0, used = 0, next_address = 0x700000000000;
static int regions = 0;
static std::map<uint64_t, std::pair<uint64_t, int>> live_regions; // address -> size, number
static std::map<void *, int> recorded;                             // event -> stream

static void call(std::string const &text) { calls += text + "; "; }
static int number_of(void *stream) { return (uintptr_t) stream < 4096 ? 0 : *(int *) stream; }

extern "C" {
static int event_create(void **event, unsigned) { static uintptr_t next = 0x10000; *event = (void *) (next += 64); recorded[*event] = -1; return 0; }
static int event_record(void *event, void *stream) { recorded[event] = number_of(stream); call("record " + std::to_string(number_of(stream))); return 0; }
static int stream_wait(void *stream, void *event, unsigned) {
    int other = recorded.count(event) ? recorded[event] : -1;
    call("wait " + std::to_string(number_of(stream)) + " for " + (other < 0 ? "nothing" : std::to_string(other)));
    return 0;
}
static int stream_synchronize(void *stream) { call("synchronize " + std::to_string(number_of(stream))); return 0; }
static int context_synchronize() { call("synchronize all"); return 0; }
static int stream_id(void *stream, unsigned long long *id) { *id = number_of(stream); return 0; }

// The templates of RMM's headers call these.
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id) { return (cudaError_t) stream_id(stream, id); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return (cudaError_t) event_create((void **) event, flags); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return (cudaError_t) event_record(event, stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return (cudaError_t) stream_wait(stream, event, flags); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return (cudaError_t) stream_synchronize(stream); }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
const char *cudaGetErrorName(cudaError_t) { return "error"; }
const char *cudaGetErrorString(cudaError_t) { return "error"; }
}

RMM_NAMESPACE_BEGIN
cuda_device_id get_current_cuda_device() { return cuda_device_id{0}; }
std::pair<size_t, size_t> available_device_memory() { return {capacity - used, capacity}; }
RMM_NAMESPACE_END

// Replaces a function of the CUDA runtime in librmm.so: the one that this function of RMM calls at this position among its calls of the runtime. In the
// file, the runtime follows RMM's own functions.
static void replace_call(const char *caller, int position, void *ours) {
    auto *code = (unsigned char *) dlsym(RTLD_DEFAULT, caller);
    auto *last_of_rmm = (unsigned char *) dlsym(RTLD_DEFAULT, "_ZN3rmm10_RMM_26_106detail26register_process_exit_hookEv");
    if (!code || !last_of_rmm) abort();
    for (;; code++) {
        int32_t distance;
        memcpy(&distance, code + 1, 4);
        unsigned char *target = code + 5 + distance, jump[12] = {0x48, 0xb8}; // mov rax, ours; jmp rax
        if (*code != 0xe8 || target < last_of_rmm || target > last_of_rmm + (1 << 20) || position--) continue; // 0xe8: call
        memcpy(jump + 2, &ours, 8);
        jump[10] = 0xff, jump[11] = 0xe0;
        if (mprotect((void *) ((uintptr_t) target & ~4095ull), 8192, PROT_READ | PROT_WRITE | PROT_EXEC)) abort();
        memcpy(target, jump, 12);
        return;
    }
}

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
struct Upstream {
    void *allocate_sync(size_t size, size_t) { return upstream_allocate(size); }
    void deallocate_sync(void *pointer, size_t, size_t) noexcept { upstream_free(pointer); }
    void *allocate(cuda::stream_ref, size_t size, size_t) { return upstream_allocate(size); }
    void deallocate(cuda::stream_ref, void *pointer, size_t, size_t) noexcept { upstream_free(pointer); }
    bool operator==(Upstream const &) const noexcept { return true; }
    bool operator!=(Upstream const &) const noexcept { return false; }
    friend void get_property(Upstream const &, cuda::mr::device_accessible) noexcept {}
};

using Resource = cuda::mr::any_resource<cuda::mr::device_accessible>;
static std::map<std::string, size_t> options;
static size_t option(const char *name, size_t otherwise) { return options.count(name) ? options[name] : otherwise; }
static std::optional<size_t> option(const char *name) { return options.count(name) ? std::optional<size_t>(options[name]) : std::nullopt; }

// The memory that a request takes: a whole block of its bin, or units of 256 B.
static size_t taken(std::string const &kind, size_t size) {
    if (kind == "fixed") return option("block", 1 << 20);
    for (size_t bin = option("least", 1); kind == "binning" && bin <= option("largest", 0); bin++) {
        if (size <= 1ull << bin) return 1ull << bin;
    }
    return (size + 255) / 256 * 256;
}

static Resource make(std::string const &kind) {
    auto pool = [&]() -> Resource {
        if (option("direct")) return Upstream{};
        return rmm::mr::pool_memory_resource{Upstream{}, option("initial", 0), option("maximum")};
    };
    if (kind == "pool") return pool();
    if (kind == "arena") return rmm::mr::arena_memory_resource{Upstream{}, option("size"), option("dump", 0) != 0};
    if (kind == "fixed") return rmm::mr::fixed_size_memory_resource{pool(), option("block", 1 << 20), option("blocks", 128)};
    if (kind == "binning") {
        if (option("range")) return rmm::mr::binning_memory_resource{pool(), (int8_t) options["least"], (int8_t) options["largest"]};
        auto upstream = pool();
        rmm::mr::binning_memory_resource binning{upstream};
        for (size_t bin = options["least"]; bin <= options["largest"]; bin++) binning.add_bin(1ull << bin, *new rmm::mr::fixed_size_memory_resource{upstream, 1ull << bin});
        return binning;
    }
    if (kind == "limiting") return rmm::mr::limiting_resource_adaptor{pool(), options["limit"], option("alignment", 256)};
    if (kind == "aligned") return rmm::mr::aligned_resource_adaptor{pool(), option("alignment", 256), option("threshold", 0)};
    abort();
}

int main(int argc, char **argv) {
    capacity = strtoull(argv[3], nullptr, 10);
    for (int i = 4; i < argc; i++) {
        char *equals = strchr(argv[i], '=');
        options[std::string(argv[i], equals)] = strtoull(equals + 1, nullptr, 10);
    }
    replace_call("_ZN3rmm10_RMM_26_102mr6detail26arena_memory_resource_impl10defragmentEv", 0, (void *) context_synchronize);
    replace_call("_ZNK3rmm10_RMM_26_1016cuda_stream_view20synchronize_no_throwEv", 0, (void *) stream_synchronize);
    const char *fixed = "_ZN3rmm10_RMM_26_102mr6detail31fixed_size_memory_resource_implC1EN4cuda2mr3__420__version_bump_ver4_12any_resourceIJNS6_17device_accessibleEEEEmm";
    replace_call(fixed, 0, (void *) stream_id);
    replace_call(fixed, 1, (void *) event_create);
    auto *resource = new Resource(make(argv[1]));
    std::map<std::string, std::pair<void *, std::pair<size_t, int>>> live;
    std::map<int, cudaStream_t> streams{{0, nullptr}};
    std::ifstream trace(argv[2]);
    for (std::string line; std::getline(trace, line);) {
        std::istringstream words(line);
        std::string kind, id, result;
        size_t size = 0;
        int number = 0;
        words >> kind >> id >> size >> number;
        if (kind == "a") {
            if (!streams.count(number)) {
                streams[number] = (cudaStream_t) malloc(8192);
                *(int *) streams[number] = number;
            }
            try {
                void *pointer = resource->allocate(cuda::stream_ref{streams[number]}, size, 256);
                live[id] = {pointer, {size, number}};
                auto region = std::prev(live_regions.upper_bound((uint64_t) pointer));
                result = "at " + std::to_string(region->second.second) + "+" + std::to_string((uint64_t) pointer - region->first) + " " + std::to_string(taken(argv[1], size));
            } catch (std::exception const &error) {
                if (getenv("WHY")) fprintf(stderr, "%s\n", error.what());
                result = "oom";
            }
        } else if (kind == "f") {
            auto found = live.find(id);
            if (found == live.end()) {
                result = "ignored";
            } else {
                auto [pointer, about] = found->second;
                resource->deallocate(cuda::stream_ref{streams[about.second]}, pointer, about.first, 256);
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
