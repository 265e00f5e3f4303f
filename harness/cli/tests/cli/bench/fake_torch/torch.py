"""Stands for torch where there is none: as much of its interface as ci/torch_reference.py uses, over an allocator that rounds to 2 MiB.

By the clock of `sitecustomize` requests of any size take PYTHON_NS, those for memory ALLOCATOR_NS more: what should be left of a sample is the
latter; a nanosecond more for each character of the settings. The device writes 128 elements in a nanosecond: a kibibyte, where they have 8
bytes. In the request of the number FAKE_TORCH_HICCUP Python does something else for 100 ms.
"""

import os
from types import SimpleNamespace

from sitecustomize import pass_time

__version__ = "0.0.fake"
uint8, int64 = 1, 8

PYTHON_NS, ALLOCATOR_NS, SEGMENT_NS = 5_000, 4_000 + len(os.environ.get("PYTORCH_ALLOC_CONF", "")), 2_000
TOTAL, PAGE = 80 << 30, 2 << 20
HICCUP = int(os.environ.get("FAKE_TORCH_HICCUP", "0"))


class OutOfMemoryError(RuntimeError):
    pass


class Allocator:
    """Blocks of whole pages; what is freed is kept for requests of the same size."""

    def __init__(self):
        self.live, self.cached, self.limit, self.next = {}, [], TOTAL, 1 << 40
        self.requests = 0

    def reserved(self):
        return sum(self.live.values()) + sum(size for _, size in self.cached)

    def allocate(self, size, stream):
        pass_time(PYTHON_NS)
        self.requests += 1
        if self.requests == HICCUP:
            pass_time(100_000_000)
        if size == 0:
            return 0
        pass_time(ALLOCATOR_NS)
        size = -(-size // PAGE) * PAGE
        fitting = [block for block in self.cached if block[1] == size]
        if fitting:
            self.cached.remove(fitting[-1])
            self.live[fitting[-1][0]] = size
            return fitting[-1][0]
        if self.reserved() + size > self.limit:
            self.empty_cache()
        if self.reserved() + size > self.limit:
            raise OutOfMemoryError("CUDA out of memory.\nAnd more of it.")
        self.next += size
        self.live[self.next] = size
        return self.next

    def empty_cache(self):
        pass_time(SEGMENT_NS * len(self.cached))
        self.cached.clear()

    def free(self, address):
        if address:
            self.cached.append((address, self.live.pop(address)))


allocator = Allocator()


class Tensor:
    def __init__(self, elements, of):
        self.size, self.elements = elements * of, elements
        self.address = allocator.allocate(self.size, 0)

    def record_stream(self, stream):
        if self.size:
            pass_time(ALLOCATOR_NS)

    def fill_(self, value):
        Event.device_ns += self.elements // 128

    def __del__(self):
        allocator.free(getattr(self, "address", 0))


def empty(size, dtype, device):
    return Tensor(size, dtype)


def device(kind, index):
    return SimpleNamespace(type=kind, index=index)


class Stream:
    count = 0

    def __init__(self, device):
        self.cuda_stream = Stream.count
        Stream.count += 1

    def synchronize(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class Event:
    device_ns = 0

    def __init__(self, enable_timing):
        self.at = None

    def record(self):
        self.at = Event.device_ns

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return (later.at - self.at) / 1e6


def set_fraction(fraction, device):
    allocator.limit = int(fraction * TOTAL)


def memory_stats(index):
    amounts = {"reserved_bytes": allocator.reserved(), "allocated_bytes": sum(allocator.live.values())}
    return {name: {"all": {"current": amount}} for name, amount in amounts.items()}


_C = SimpleNamespace(
    _cuda_cudaCachingAllocator_raw_alloc=allocator.allocate,
    _cuda_cudaCachingAllocator_raw_delete=allocator.free,
    _cuda_memoryStats=memory_stats,
)
cuda = SimpleNamespace(
    OutOfMemoryError=OutOfMemoryError,
    Event=Event,
    Stream=Stream,
    current_stream=Stream,
    empty_cache=allocator.empty_cache,
    get_device_properties=lambda device: SimpleNamespace(total_memory=TOTAL),
    init=lambda: None,
    is_available=lambda: True,
    set_device=lambda device: None,
    set_per_process_memory_fraction=set_fraction,
    stream=lambda stream: stream,
    synchronize=lambda device=None: None,
)
