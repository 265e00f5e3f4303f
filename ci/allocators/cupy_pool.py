"""CuPy's SingleDeviceMemoryPool on a device that exists only as addresses.

    python3 cupy_pool.py TRACE CAPACITY [limit=N]

TRACE has the lines `a ID SIZE STREAM`, `f ID` and `e`, which is `free_all_blocks`. The program prints the decision of each one, in the form of a recording.
Which of equally large chunks the pool takes, and the order of consecutive frees, depend on the addresses of Python objects. Consecutive frees are sorted by
region."""
import bisect
import ctypes
import importlib
import sys

PAGE = 2 << 20
api = ctypes.pythonapi
api.PyCapsule_New.restype, api.PyCapsule_New.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
kept = []  # what capsules refer to


class WithoutDriver:
    """Before cupy.cuda.memory is imported: replaces the two functions that it takes from other modules and that ask the driver."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "cupy.cuda.memory":
            replace("cupy.cuda.device", "get_device_id", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda skip_dispatch: 0))
            replace("cupy.cuda.stream", "get_current_stream_ptr", ctypes.CFUNCTYPE(ctypes.c_ssize_t)(lambda: stream))


def replace(module, name, function):
    functions = importlib.import_module(module).__pyx_capi__
    signature = ctypes.create_string_buffer(api.PyCapsule_GetName(functions[name]))
    kept.extend([function, signature])
    functions[name] = api.PyCapsule_New(ctypes.cast(function, ctypes.c_void_p), signature, None)


sys.meta_path.insert(0, WithoutDriver)
stream = 0
from cupy.cuda import memory
from cupy_backends.cuda.api.runtime import CUDARuntimeError


class Device:
    def __init__(self, capacity):
        self.free, self.following = capacity, 0x700000000000
        self.starts, self.sizes, self.calls, self.freed = [], [], [], []

    def malloc(self, size, device):
        self.note_frees()
        pages = -(-size // PAGE) * PAGE
        if pages > self.free:
            self.calls.append(f"malloc {size} -> oom; ")
            raise CUDARuntimeError(2)
        self.calls.append(f"malloc {size} -> {len(self.starts)}; ")
        self.starts.append(self.following)  # addresses go up and are never reused
        self.sizes.append(pages)
        self.free, self.following = self.free - pages, self.following + pages
        return self.starts[-1]

    def release(self, address, device):
        region = bisect.bisect(self.starts, address) - 1
        self.free += self.sizes[region]
        self.freed.append(region)

    def note_frees(self):
        self.calls.extend(f"free {region}; " for region in sorted(self.freed))
        self.freed.clear()

    def place(self, address):
        region = bisect.bisect(self.starts, address) - 1
        return f"{region}+{address - self.starts[region]}"

    def line(self, result):
        self.note_frees()
        line = "".join(self.calls) + result
        self.calls.clear()
        return line


def decisions(trace, capacity, limit=0):
    global stream
    device, live = Device(capacity), {}
    pool = memory.SingleDeviceMemoryPool(memory.PythonFunctionAllocator(device.malloc, device.release).malloc)
    pool.set_limit(size=limit)
    for line in open(trace):
        kind, name, *rest = [*line.split(), None]
        if kind == "a":
            stream = int(rest[1])
            try:
                live[name] = pool.malloc(int(rest[0]))
                yield device.line(f"at {device.place(live[name].ptr)} {live[name].mem.size}")
            except memory.OutOfMemoryError:
                yield device.line("oom")
        elif kind == "e":
            pool.free_all_blocks()
            yield device.line("")
        else:
            yield device.line("freed" if live.pop(name, None) else "ignored")


if __name__ == "__main__":
    for line in decisions(sys.argv[1], int(sys.argv[2]), **{name: int(value) for name, value in (option.split("=") for option in sys.argv[3:])}):
        print(line)
