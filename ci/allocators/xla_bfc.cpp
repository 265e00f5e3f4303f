// XLA's BFC allocator (xla_cuda_plugin.so of the wheel jax-cuda13-pjrt) on the simulated GPU of `harness exec`.
//
//     harness exec --cuda 13 --memory TOTAL -- xla_bfc PLUGIN TRACE TOTAL limit=N [preallocate=0]
//
// TRACE has the lines `a ID SIZE STREAM` and `f ID`. The program prints the decision of each one, in the form of a recording. It ignores the streams.
//
// The plugin shows no call of the driver, but the addresses of arrays and the bytes of the pool. With preallocation, a region ends where its first array
// does. Without, it starts there.
// XLA waits ten seconds for another thread before a request fails. This program's clock jumps over that time.
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

static thread_local bool waits = false;
static thread_local int64_t skipped = 0;

static long raw(long number, long a, long b, long c, long d = 0, long e = 0, long f = 0) {
    register long r10 asm("r10") = d, r8 asm("r8") = e, r9 asm("r9") = f;
    long result;
    asm volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
    return result;
}

// A wait with a limit ends at once, and each look at the clock sees a later time.
extern "C" long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long a[6];
    for (long &argument : a) argument = va_arg(list, long);
    va_end(list);
    int wait = a[1] & 127; // FUTEX_WAIT or FUTEX_WAIT_BITSET
    if (waits && number == SYS_futex && (wait == 0 || wait == 9) && a[3]) return errno = ETIMEDOUT, -1;
    long result = raw(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    return result < 0 ? errno = -result, -1 : result;
}

extern "C" int clock_gettime(clockid_t clock, timespec *time) {
    int result = raw(SYS_clock_gettime, clock, (long) time, 0);
    if (waits) skipped += 20;
    time->tv_sec += skipped;
    return result;
}

extern "C" int gettimeofday(timeval *time, void *) {
    timespec now;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    *time = {now.tv_sec, now.tv_nsec / 1000};
    return result;
}

// All arguments are structures of words: first the size, then an extension.
using Words = int64_t[16];
static int64_t (**functions)(int64_t *);

static int64_t call(int function, int64_t *arguments, int words) {
    arguments[0] = words * 8, arguments[1] = 0;
    return functions[function](arguments);
}

static void must(int function, int64_t *arguments, int words) {
    int64_t error = call(function, arguments, words);
    if (!error) return;
    Words message = {0, 0, error};
    call(1, message, 5); // Error_Message
    fprintf(stderr, "%.*s\n", (int) message[4], (const char *) message[3]);
    exit(1);
}

int main(int argc, char **argv) {
    std::map<std::string, double> options = {{"preallocate", 1}};
    for (int i = 4; i < argc; i++) {
        char *equals = strchr(argv[i], '=');
        options[std::string(argv[i], equals)] = atof(equals + 1);
    }
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    char *api = ((char *(*)()) dlsym(library, "GetPjrtApi"))();
    functions = (int64_t (**)(int64_t *)) (api + 40);
    Words none = {}, client = {}, devices = {};
    must(3, none, 2); // Plugin_Initialize
    float fraction = options["limit"] / strtod(argv[3], nullptr); // XLA takes it in single precision
    int64_t fraction_bits = 0;
    memcpy(&fraction_bits, &fraction, sizeof fraction);
    int64_t named[3][7] = {
        {56, 0, (int64_t) "memory_fraction", 15, 3, fraction_bits, 1},
        {56, 0, (int64_t) "preallocate", 11, 4, options["preallocate"] != 0, 1},
        {56, 0, (int64_t) "allocator", 9, 0, (int64_t) "bfc", 3},
    };
    client[2] = (int64_t) named, client[3] = 3;
    must(10, client, 11); // Client_Create
    devices[2] = client[8];
    must(16, devices, 5); // Client_AddressableDevices
    int64_t device = *(int64_t *) devices[3];
    Words memories = {0, 0, device};
    must(33, memories, 4); // Device_DefaultMemory
    int64_t memory = memories[3];
    auto statistics = [&] {
        static int64_t words[26];
        words[2] = device;
        must(34, words, 26); // Device_MemoryStats
        return words;
    };
    auto allocate = [&](int64_t size, int64_t *buffer) {
        int64_t dimension = 0, layout[10] = {80, 0, 56, 0, (int64_t) &dimension, 1};
        Words words = {0, 0, client[8], (int64_t) &size, 1, 6 /* U8 */, (int64_t) layout, 0, memory};
        waits = true;
        int64_t error = call(112, words, 10); // Client_CreateUninitializedBuffer
        waits = false;
        if (error) {
            Words destroyed = {0, 0, error};
            call(0, destroyed, 3);
            return (int64_t) 0;
        }
        *buffer = words[9];
        Words address = {0, 0, *buffer};
        must(73, address, 4); // Buffer_UnsafePointer
        return address[3];
    };
    auto destroy = [&](int64_t buffer) {
        Words words = {0, 0, buffer};
        must(58, words, 3); // Buffer_Destroy
    };
    std::map<int64_t, std::pair<int64_t, int>> regions; // address -> size, number
    int64_t pool = 0;
    std::map<std::string, int64_t> live;
    std::ifstream trace(argv[2]);
    for (std::string line; std::getline(trace, line);) {
        std::istringstream words(line);
        std::string kind, id, result;
        int64_t size = 0, buffer = 0;
        words >> kind >> id >> size;
        int64_t before = statistics()[3];
        if (kind == "a") {
            int64_t address = allocate(size, &buffer);
            int64_t taken = statistics()[3] - before, added = statistics()[20] - pool;
            pool += added;
            if (added) {
                int number = regions.size();
                regions[options["preallocate"] ? address + taken - added : address] = {added, number};
                result = "malloc " + std::to_string(added) + " -> " + std::to_string(number) + "; ";
            }
            if (address) {
                live[id] = buffer;
                auto found = std::prev(regions.upper_bound(address));
                result += "at " + std::to_string(found->second.second) + "+" + std::to_string(address - found->first) + " " + std::to_string(taken);
            } else result += "oom";
        } else {
            auto found = live.find(id);
            result = found == live.end() ? "ignored" : "freed";
            if (found != live.end()) destroy(found->second), live.erase(found);
        }
        printf("%s\n", result.c_str());
    }
    fflush(stdout);
    _Exit(0);
}
