// TensorFlow's BFCAllocator (libtensorflow_framework.so.2 and the headers of the wheel tensorflow-cpu) on a device that exists only as addresses.
//
//     bfc TRACE CAPACITY [growth=0] [gc=0] [limit=N]
//
// TRACE has the lines `a ID SIZE STREAM` and `f ID`. The program prints the decision of each one, in the form of a recording. It ignores the streams.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#if __has_include("xla/tsl/framework/bfc_allocator.h")
#include "xla/tsl/framework/bfc_allocator.h"
#else // before TensorFlow 2.18
#include "tsl/framework/bfc_allocator.h"
#endif

static const uint64_t BASE = 0x700000000000, PAGE = 2 << 20;

struct Device {
    uint64_t capacity, used = 0, next = BASE;
    int count = 0;
    std::map<uint64_t, std::pair<uint64_t, int>> live; // address -> size, number
    std::string log;
    uint64_t malloc(uint64_t size) {
        uint64_t pages = (size + PAGE - 1) / PAGE * PAGE;
        if (pages > capacity - used) { log += "malloc " + std::to_string(size) + " -> oom; "; return 0; }
        uint64_t address = next; // addresses go up and are never reused
        next += pages;
        used += pages;
        live[address] = {size, count};
        log += "malloc " + std::to_string(size) + " -> " + std::to_string(count++) + "; ";
        return address;
    }
    void free(uint64_t address) {
        auto found = live.find(address);
        used -= (found->second.first + PAGE - 1) / PAGE * PAGE;
        log += "free " + std::to_string(found->second.second) + "; ";
        live.erase(found);
    }
    std::string place(uint64_t address) {
        auto found = std::prev(live.upper_bound(address));
        return std::to_string(found->second.second) + "+" + std::to_string(address - found->first);
    }
};

struct Sub : tsl::SubAllocator {
    Device *device;
    explicit Sub(Device *device) : tsl::SubAllocator({}, {}), device(device) {}
    void *Alloc(size_t, size_t size, size_t *received) override {
        uint64_t address = device->malloc(size);
        *received = address ? size : 0;
        return reinterpret_cast<void *>(address);
    }
    void Free(void *address, size_t) override { device->free(reinterpret_cast<uint64_t>(address)); }
    bool SupportsCoalescing() const override { return false; }
};

int main(int argc, char **argv) {
    std::map<std::string, double> options = {{"growth", 1}, {"gc", 1}, {"limit", 0}};
    for (int i = 3; i < argc; i++) {
        char *equals = strchr(argv[i], '=');
        options[std::string(argv[i], equals)] = atof(equals + 1);
    }
    Device device;
    device.capacity = strtoull(argv[2], nullptr, 10);
    tsl::BFCAllocator::Options chosen;
    chosen.allow_growth = options["growth"] != 0;
    chosen.allow_retry_on_failure = false;
    chosen.garbage_collection = options["gc"] != 0;
    uint64_t limit = options["limit"] ? (uint64_t) options["limit"] : device.capacity;
    auto *allocator = new tsl::BFCAllocator(std::make_unique<Sub>(&device), limit, "oracle", chosen);
    std::map<std::string, void *> live;
    std::ifstream trace(argv[1]);
    for (std::string line; std::getline(trace, line);) {
        std::istringstream words(line);
        std::string kind, id;
        uint64_t size = 0;
        words >> kind >> id >> size;
        device.log.clear();
        std::string result;
        if (kind == "a") {
            void *pointer = allocator->AllocateRaw(1, size);
            if (pointer) live[id] = pointer;
            result = pointer ? "at " + device.place((uint64_t) pointer) + " " + std::to_string(allocator->AllocatedSize(pointer)) : "oom";
        } else if (kind == "f") {
            if (live.count(id)) {
                allocator->DeallocateRaw(live[id]);
                live.erase(id);
                result = "freed";
            } else result = "ignored";
        } else continue;
        printf("%s%s\n", device.log.c_str(), result.c_str());
    }
    fflush(stdout);
    _Exit(0);
}
