// ONNX Runtime's BFCArena (libonnxruntime.so of the wheel onnxruntime) on a device that exists only as addresses. The arena of the CPU is the arena of
// the CUDA execution provider with another allocator below: aligned `new` and `delete`, which this program replaces.
//
//     ort_arena LIBRARY TRACE CAPACITY [limit=N] [strategy=0|1] [initial=N] [dead=N] [growth=N] [largest=N]
//
// TRACE has the lines `a ID SIZE STREAM`, `f ID` and `e`, which runs the model with the option `memory.enable_memory_arena_shrinkage`. The program prints
// the decision of each one, in the form of a recording. It ignores the streams.
// The default of each option is that of `OrtArenaCfg`.
#include <cstdio>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <map>
#include <new>
#include <sstream>
#include <string>

static const uint64_t BASE = 0x700000000000, PAGE = 2 << 20;

static struct {
    bool on = false; // only while the arena works
    uint64_t capacity = 0, used = 0, next = BASE;
    int count = 0;
    std::map<uint64_t, std::pair<uint64_t, int>> *live = nullptr; // address -> size, number
    std::string *log = nullptr;
} device;

static uint64_t pages(uint64_t size) { return (size + PAGE - 1) / PAGE * PAGE; }

void *operator new(size_t size, std::align_val_t alignment) {
    if (!device.on) return aligned_alloc((size_t) alignment, (size + (size_t) alignment - 1) / (size_t) alignment * (size_t) alignment);
    if (pages(size) > device.capacity - device.used) {
        *device.log += "malloc " + std::to_string(size) + " -> oom; ";
        throw std::bad_alloc();
    }
    uint64_t address = device.next; // addresses go up and are never reused
    (*device.live)[address] = {size, device.count};
    device.next += pages(size);
    device.used += pages(size);
    *device.log += "malloc " + std::to_string(size) + " -> " + std::to_string(device.count++) + "; ";
    return (void *) address;
}

void operator delete(void *pointer, std::align_val_t) noexcept {
    if (!device.live || !device.live->count((uint64_t) pointer)) return free(pointer);
    auto found = device.live->find((uint64_t) pointer);
    device.used -= pages(found->second.first);
    *device.log += "free " + std::to_string(found->second.second) + "; ";
    device.live->erase(found);
}

static void **api;

// Calls the function at an index of the public table, whose order never changes.
template <typename... Arguments> static void call(int index, Arguments... arguments) {
    void *status = ((void *(*)(Arguments...)) api[index])(arguments...);
    if (!status) return;
    fprintf(stderr, "%s\n", ((const char *(*)(void *)) api[2])(status));
    exit(1);
}

int main(int argc, char **argv) {
    const char *names[] = {"limit", "strategy", "initial", "dead", "growth", "largest"};
    const char *keys[] = {"max_mem", "arena_extend_strategy", "initial_chunk_size_bytes", "max_dead_bytes_per_chunk", "initial_growth_chunk_size_bytes", "max_power_of_two_extend_bytes"};
    const char *set[6];
    size_t values[6], count = 0;
    for (int i = 4; i < argc; i++) {
        char *equals = strchr(argv[i], '=');
        for (int name = 0; name < 6; name++) {
            if (std::string(argv[i], equals) != names[name]) continue;
            set[count] = keys[name];
            values[count++] = strtoull(equals + 1, nullptr, 10);
        }
    }
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    struct Base { void **(*get)(uint32_t); const char *(*version)(); };
    // The newest version of the table of functions. Before 23 (ONNX Runtime 1.23), the arena has no statistics, so the sizes of allocations are unknown.
    uint32_t version = 25;
    do api = ((Base * (*)()) dlsym(library, "OrtGetApiBase"))()->get(version);
    while (!api && --version);
    bool counts = version >= 23;
    // A model with one node, because only a session gives access to the arena.
    static const char model[] = "\x08\x08\x3a\x37\x0a\x10\x0a\x01\x78\x12\x01\x79\x22\x08Identity\x12\x01g\x5a\x0f\x0a\x01x\x12\x0a\x0a\x08\x08\x01\x12\x04\x0a\x02\x08\x01"
                                "\x62\x0f\x0a\x01y\x12\x0a\x0a\x08\x08\x01\x12\x04\x0a\x02\x08\x01\x42\x02\x10\x0d";
    void *environment, *memory, *configuration, *session_options, *session;
    void *allocator;
    call(3, 3, "arena", &environment);                         // CreateEnv
    call(69, 1, 0, &memory);                                   // CreateCpuMemoryInfo
    call(164, set, values, count, &configuration);             // CreateArenaCfgV2
    call(144, environment, memory, configuration);             // CreateAndRegisterAllocator
    call(10, &session_options);                                // CreateSessionOptions
    call(130, session_options, "session.use_env_allocators", "1"); // AddSessionConfigEntry
    call(8, environment, model, sizeof model - 1, session_options, &session); // CreateSessionFromArray
    call(131, session, memory, &allocator);                    // CreateAllocator
    // The input and the output lie outside the arena, so a run only shrinks it.
    void *shrinking, *values_of_run[2];
    float tensors[2][1] = {};
    int64_t shape = 1;
    call(39, &shrinking);                                      // CreateRunOptions
    call(165, shrinking, "memory.enable_memory_arena_shrinkage", "cpu:0"); // AddRunConfigEntry
    for (int i = 0; i < 2; i++) call(49, memory, tensors[i], sizeof tensors[i], &shape, size_t(1), 1, &values_of_run[i]); // CreateTensorWithDataAsOrtValue
    std::map<uint64_t, std::pair<uint64_t, int>> regions;
    std::map<std::string, void *> live;
    std::string log;
    device.live = &regions, device.log = &log, device.capacity = strtoull(argv[3], nullptr, 10);
    auto place = [&](uint64_t address) {
        auto found = std::prev(regions.upper_bound(address));
        return std::to_string(found->second.second) + "+" + std::to_string(address - found->first);
    };
    auto in_use = [&]() -> uint64_t {
        if (!counts) return 0;
        void *statistics;
        call(319, allocator, &statistics); // AllocatorGetStats
        uint64_t bytes = strtoull(((const char *(*)(void *, const char *)) api[297])(statistics, "InUse"), nullptr, 10); // GetKeyValue
        ((void (*)(void *)) api[300])(statistics); // ReleaseKeyValuePairs
        return bytes;
    };
    std::ifstream trace(argv[2]);
    for (std::string line; std::getline(trace, line);) {
        std::istringstream words(line);
        std::string kind, id, result;
        uint64_t size = 0;
        words >> kind >> id >> size;
        log.clear();
        uint64_t before = in_use();
        device.on = true;
        if (kind == "a") {
            void *pointer = nullptr;
            void *failed = ((void *(*)(void *, size_t, void **)) api[75])(allocator, size, &pointer); // AllocatorAlloc
            device.on = false;
            if (failed) ((void (*)(void *)) api[93])(failed); // ReleaseStatus
            if (pointer) live[id] = pointer;
            result = pointer ? "at " + place((uint64_t) pointer) + " " + (counts ? std::to_string(in_use() - before) : "?") : "oom";
        } else if (kind == "f") {
            auto found = live.find(id);
            if (found != live.end()) {
                call(76, allocator, found->second); // AllocatorFree
                live.erase(found);
                result = "freed";
            } else result = "ignored";
        } else if (kind == "e") {
            const char *input = "x", *output = "y";
            call(9, session, shrinking, &input, &values_of_run[0], size_t(1), &output, size_t(1), &values_of_run[1]); // Run
        }
        device.on = false;
        printf("%s%s\n", log.c_str(), result.c_str());
    }
    fflush(stdout);
    _Exit(0);
}
