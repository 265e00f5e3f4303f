#!/usr/bin/env python3
"""PyTorch's own CUDA caching allocator as one more arm of `harness bench`.

`harness bench --torch python3` starts this program once, as a process of its own, and lets it take its turn in every round among the other
arms: what drifts on the machine hits it like them, and its samples go into the same record. It can be tried by hand:

    echo '{"do": "latency", "case": "hit", "size": 2097152, "batch": 100}' | python3 ci/torch_reference.py [ORDINAL]

Protocol: one JSON object a line. It first says what it is, {"arm": "torch", "version": "2.11.0", "note": "..."}, or {"unavailable": "why"}
and ends. Each request is then answered with {"samples_ps": [...]}, {"skipped": "why"} or {"failed": "why"}. Unknown requests are skipped, so
that it serves newer and older harnesses. "memory", in bytes, limits what the allocator may take from then on. It ends with its standard input.

What is timed: `caching_allocator_alloc` and `caching_allocator_delete`, the thinnest way from Python to the allocator. The interpreter's own
share of a call is measured with requests for zero bytes, which return before the allocator does anything, and taken off each sample: the
figures are those of the allocator, not of Python. Times are of the host's monotonic clock, in picoseconds an operation.

Needs nothing but the standard library, and torch with a GPU. Allocations are plain device memory; nothing of the machine is set.
"""

import json
import sys
import time

clock = time.perf_counter_ns


class Skipped(Exception):
    """The request cannot be done here; the reason is the message."""


class Torch:
    """Torch's allocator on one device, asked for raw memory."""

    def __init__(self, ordinal):
        import torch

        if not torch.cuda.is_available():
            raise Skipped("torch finds no CUDA device")
        self.torch = torch
        self.device = torch.device("cuda", ordinal)
        torch.cuda.set_device(self.device)
        torch.cuda.init()
        self.stream = torch.cuda.current_stream(self.device)
        # Below the wrappers of torch.cuda, which build context managers for each call.
        self.allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
        self.free = torch._C._cuda_cudaCachingAllocator_raw_delete
        self.total = torch.cuda.get_device_properties(self.device).total_memory
        self.memory = None
        self.handle = self.stream.cuda_stream

    def limit(self, memory):
        if memory != self.memory:
            self.torch.cuda.set_per_process_memory_fraction(min(1.0, memory / self.total), self.device)
            self.memory = memory

    def reset(self):
        """As fresh as an allocator of one process can be made: nothing live, nothing cached."""
        self.torch.cuda.synchronize(self.device)
        self.torch.cuda.empty_cache()

    def interpreter_pair(self, batch):
        """Nanoseconds that Python takes for `batch` pairs of calls in which the allocator does nothing."""
        allocate, free, handle = self.allocate, self.free, self.handle
        start = clock()
        for _ in range(batch):
            free(allocate(0, handle))
        return clock() - start

    def pairs(self, size, batch):
        """Nanoseconds for `batch` allocations of `size`, each freed at once."""
        allocate, free, handle = self.allocate, self.free, self.handle
        start = clock()
        for _ in range(batch):
            free(allocate(size, handle))
        return clock() - start

    def single(self, size):
        """One allocation: its address and its time."""
        start = clock()
        address = self.allocate(size, self.handle)
        return address, clock() - start

    def latency(self, case, size, batch):
        if case == "hit":
            self.free(self.allocate(size, self.handle))
            own = sorted(self.interpreter_pair(batch) for _ in range(5))[2]
            return [max(0, self.pairs(size, batch) - own) * 1000 // batch]
        if case not in ("miss", "after_empty_cache"):
            raise Skipped(f"the case {case!r} is not known here")
        self.reset()
        if case == "after_empty_cache":
            self.free(self.allocate(size, self.handle))
            self.torch.cuda.empty_cache()
        address, taken = self.single(size)
        self.free(address)
        own = sorted(self.interpreter_pair(1) for _ in range(5))[2]
        return [max(0, taken - own) * 1000]

    def empty_cache(self, segments, size):
        """The cost of giving back so many cached segments."""
        self.reset()
        held = [self.allocate(size, self.handle) for _ in range(segments)]
        for address in held:
            self.free(address)
        self.torch.cuda.synchronize(self.device)
        start = clock()
        self.torch.cuda.empty_cache()
        return [(clock() - start) * 1000]

    def answer(self, request):
        kind = request.get("do")
        if "memory" in request:
            self.limit(request["memory"])
        if kind == "latency":
            return self.latency(request["case"], request["size"], max(1, request.get("batch", 1)))
        if kind == "empty_cache":
            return self.empty_cache(request["segments"], request["size"])
        raise Skipped(f"the request {kind!r} is not known here")


def say(answer):
    print(json.dumps(answer), flush=True)


def main():
    ordinal = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    try:
        torch = Torch(ordinal)
    except ImportError as error:
        return say({"unavailable": f"this Python has no torch ({error})"})
    except (Skipped, RuntimeError) as error:
        return say({"unavailable": str(error).splitlines()[0]})
    note = "called from Python; the interpreter's own time, measured with requests for zero bytes, is taken off"
    say({"arm": "torch", "version": torch.torch.__version__, "note": note})
    for line in sys.stdin:
        try:
            say({"samples_ps": torch.answer(json.loads(line))})
        except Skipped as error:
            say({"skipped": str(error)})
        except (torch.torch.cuda.OutOfMemoryError, RuntimeError, KeyError, ValueError) as error:
            torch.reset()
            say({"failed": f"{type(error).__name__}: {error}".splitlines()[0]})
    return None


if __name__ == "__main__":
    main()
