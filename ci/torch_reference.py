#!/usr/bin/env python3
"""Runs PyTorch's own CUDA caching allocator for `harness bench`.

`harness bench --torch python3` starts this program once. It takes its turn in every round, so drift of the machine affects it like all other
allocators, and its samples go into the same record. To try it by hand:

    echo '{"do": "latency", "case": "hit", "size": 2097152, "batch": 100}' | python3 ci/torch_reference.py [ORDINAL]

Protocol: one JSON object per line. The first line is {"arm": "torch", "version": "2.11.0", "note": "..."}, or {"unavailable": "why"}, after which
the program ends. The answer to each request is {"samples_ps": [...]}, {"skipped": "why"} or {"failed": "why"}. Unknown requests are skipped, so
other versions of the harness work too. "memory", in bytes, limits the allocator from then on. The program ends with its standard input.

    {"do": "latency", "case": "hit" | "miss" | "after_empty_cache", "size": BYTES, "batch": PAIRS}
    {"do": "empty_cache", "segments": N, "size": BYTES}
    {"do": "recovery", "size": BYTES}
    {"do": "record_stream", "streams": N, "size": BYTES, "batch": CYCLES}
    {"do": "pipeline", "size": BYTES, "turns": N}         samples are of the device's time, by events
    {"do": "load", "trace": NAME, "events": ["a 0 512 0", "f 0", ...], "refused": N}      keeps an allocation trace; no samples
    {"do": "trace", "trace": NAME}                        samples of one operation, with "operations", "reserved" and "unused"

"reserved" is the peak of reserved bytes, "unused" the part that was not allocated then. "refused" is the number of requests of a trace that must
fail with out of memory; without it any number may fail.

The program times `raw_alloc` and `raw_delete`, the shortest path from Python to the allocator, and tensors where the API takes a tensor
(`record_stream`, `pipeline`). The same calls with zero bytes, which return before the allocator runs, measure the interpreter's overhead, which is
subtracted from each sample. `pipeline` subtracts nothing: the device works while Python prepares the next calls, and a sample in which the device
would wait for Python is dropped. Its tensors have 8-byte words, as in the harness, but torch's `fill_` is a different kernel, and the figures
include this difference.

Needs the standard library, and torch with a GPU. Allocations are plain device memory. No setting of the machine is changed.
"""

import gc
import json
import math
import sys
import time

clock = time.perf_counter_ns

# Number of streams per priority in torch's pool; torch reuses them in order.
STREAMS = 32
# Maximum share of the device's time that the host may need to queue its work, so the device never waits.
LEAD = 0.9
# Retries of a `pipeline` sample for which the interpreter was too slow.
TRIES = 5
# Operations of a trace: (kind, slot, size, stream). `record_stream` needs a tensor.
ALLOCATE, FREE, ALLOCATE_TENSOR, FREE_TENSOR, RECORD, OTHER = range(6)


class Skipped(Exception):
    """The request is not possible here; the message is the reason."""


class Failed(Exception):
    """The request failed; the message is the observation."""


def median(values):
    values = sorted(values)
    return values[len(values) // 2]


class Trace:
    """An allocation trace, prepared for repeated passes."""

    def __init__(self, events, refused):
        lines = [event.split() for event in events]
        self.refused = refused
        self.streams = max((int(words[-1]) for words in lines if words[0] in ("a", "r", "s")), default=0)
        self.slots = {}
        self.tensors = {words[1] for words in lines if words[0] == "r"}
        self.operations = [self.compile(words) for words in lines]
        freed = {operation[1] for operation in self.operations if operation[0] == FREE}
        # Live at the end.
        self.left = [operation[1] for operation in self.operations if operation[0] == ALLOCATE and operation[1] not in freed]
        self.allocations = sum(operation[0] in (ALLOCATE, ALLOCATE_TENSOR) for operation in self.operations)
        # The same operations with zero bytes measure the interpreter's overhead.
        self.without_memory = [(kind, slot, 0, stream) for kind, slot, _, stream in self.operations if kind != OTHER]
        # By memory limit: peak reserved bytes, and the part not allocated then.
        self.highest = {}

    def compile(self, words):
        kind, *rest = words
        if kind in ("a", "f", "r"):
            slot = self.slots.setdefault(rest[0], len(self.slots))
            tensor = rest[0] in self.tensors
        if kind == "a":
            return (ALLOCATE_TENSOR if tensor else ALLOCATE, slot, int(rest[1]), int(rest[2]))
        if kind == "f":
            return (FREE_TENSOR if tensor else FREE, slot, 0, 0)
        if kind == "r":
            return (RECORD, slot, 0, int(rest[1]))
        if kind in ("s", "d", "e", "p"):
            return (OTHER, 0, kind, int(rest[0]) if rest else 0)
        pools = dict.fromkeys(("g+", "g-", "gr"), "private pools")
        what = {"x": "memory that other programs take", "m": "a memory fraction", **pools}.get(kind, f"the operation {kind!r}")
        raise Skipped(f"a trace with {what} is not gone through from Python")


class Torch:
    """Torch's allocator on one device. Requests raw memory, or tensors if necessary."""

    def __init__(self, ordinal):
        import torch

        if not torch.cuda.is_available():
            raise Skipped("torch finds no CUDA device")
        self.torch = torch
        self.device = torch.device("cuda", ordinal)
        torch.cuda.set_device(self.device)
        torch.cuda.init()
        # Creates the context, so the parent process sees it on the device from the first line.
        torch.cuda.synchronize(self.device)
        # Avoids the wrappers of torch.cuda, which create context managers for each call.
        self.allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
        self.free = torch._C._cuda_cudaCachingAllocator_raw_delete
        self.out_of_memory = torch.cuda.OutOfMemoryError
        self.total = torch.cuda.get_device_properties(self.device).total_memory
        self.memory = self.total
        self.streams = [torch.cuda.current_stream(self.device)]
        self.handle = self.streams[0].cuda_stream
        # Live addresses of a request, to free them if it ends early.
        self.held = []
        self.traces = {}

    def limit(self, memory):
        if memory == self.memory:
            return
        fraction = min(1.0, memory / self.total)
        # The allocator truncates fraction × total to whole bytes, so a slightly small product would lose one byte.
        while fraction < 1.0 and int(fraction * self.total) < memory:
            fraction = math.nextafter(fraction, 1.0)
        self.torch.cuda.set_per_process_memory_fraction(fraction, self.device)
        self.memory = memory

    def reset(self):
        """Makes the allocator as fresh as one process allows: nothing live or cached, so the memory is free for other arms."""
        self.free_all(self.held)
        self.held = []
        self.torch.cuda.synchronize(self.device)
        self.torch.cuda.empty_cache()

    def free_all(self, addresses):
        free = self.free
        for address in addresses:
            free(address)

    def others(self, count):
        """Returns `count` streams other than the default one."""
        if count > STREAMS:
            raise Skipped(f"torch has {STREAMS} streams beside the default one, and this needs {count}")
        while len(self.streams) <= count:
            self.streams.append(self.torch.cuda.Stream(self.device))
        return self.streams[1 : count + 1]

    def words(self, size):
        """A tensor of 8-byte words, like the harness's own kernel. Torch fills bytes with another kernel, which may be slower."""
        return self.torch.empty((size + 7) // 8, dtype=self.torch.int64, device=self.device)

    def tensor(self, size, stream=0):
        torch = self.torch
        if stream == 0:
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        with torch.cuda.stream(self.streams[stream]):
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def latency(self, case, size, batch):
        if case == "hit":
            self.free(self.allocate(size, self.handle))
            own = median(self.pairs(0, batch) for _ in range(5))
            return [max(0, self.pairs(size, batch) - own) * 1000 // batch]
        if case not in ("miss", "after_empty_cache"):
            raise Skipped(f"the case {case!r} is not known here")
        if case == "after_empty_cache":
            self.free(self.allocate(size, self.handle))
            self.torch.cuda.empty_cache()
        own = median(self.single(0) for _ in range(5))
        return [max(0, self.single(size) - own) * 1000]

    def pairs(self, size, batch):
        """Nanoseconds for `batch` allocations of `size`, each freed immediately."""
        allocate, free, handle = self.allocate, self.free, self.handle
        start = clock()
        for _ in range(batch):
            free(allocate(size, handle))
        return clock() - start

    def single(self, size):
        """Nanoseconds for one allocation; its free is not timed."""
        start = clock()
        address = self.allocate(size, self.handle)
        taken = clock() - start
        self.free(address)
        return taken

    def empty_cache(self, segments, size):
        """The cost of releasing this many cached segments."""
        for _ in range(segments):
            self.held.append(self.allocate(size, self.handle))
        self.free_all(self.held)
        self.held = []
        self.torch.cuda.synchronize(self.device)
        start = clock()
        self.torch.cuda.empty_cache()
        return [(clock() - start) * 1000]

    def recovery(self, size):
        """From the start of a request that fails with full memory to the end of a step with half as many requests."""
        # Expandable segments may exceed the limit by a page.
        most = 2 * (self.memory // size) + 2
        while self.is_served(size):
            if len(self.held) > most:
                raise Failed(f"{len(self.held)} × {size} bytes were handed out, more than the limit of {self.memory}")
        if not self.held:
            raise Skipped(f"not one request of {size} bytes fits into {self.memory}")
        full, self.held = self.held, []
        own = median(self.recover([0] * len(full), 0) for _ in range(3))
        self.held = full
        return [max(0, self.recover(full, size) - own) * 1000]

    def is_served(self, size):
        try:
            self.held.append(self.allocate(size, self.handle))
        except self.out_of_memory:
            return False
        return True

    def recover(self, full, size):
        """Nanoseconds. With zero bytes, which never fail, this is the interpreter's overhead."""
        start = clock()
        served = self.is_served(size)
        if served and size:
            raise Failed("a request that was refused before is served, though nothing was freed")
        self.free_all(full)
        self.held = []
        if size:
            self.torch.cuda.empty_cache()
        for _ in range((len(full) + 1) // 2):
            if not self.is_served(size):
                raise Failed("half of what was freed is not to be had again")
        return clock() - start

    def record_stream(self, streams, size, batch):
        """An allocation, `record_stream` for other streams, and the free."""
        others = self.others(streams)
        self.cycles(size, others, 4)
        own = median(self.cycles(0, others, batch) for _ in range(3))
        return [max(0, self.cycles(size, others, batch) - own) * 1000 // batch]

    def cycles(self, size, others, batch):
        tensor = self.tensor
        start = clock()
        for _ in range(batch):
            block = tensor(size)
            for stream in others:
                block.record_stream(stream)
            del block
        return clock() - start

    def pipeline(self, size, turns):
        """The stream's time for one turn of allocation, writing all of it, and free."""
        self.turns(size, turns)
        # An interruption of the host invalidates only its own sample.
        tried = []
        for _ in range(TRIES):
            device, host = self.turns(size, turns)
            if host <= LEAD * device:
                return [device * 1000 // turns]
            tried.append((host, device))
        host, device = min(tried)
        took = f"{host // turns} ns a turn beside the device's {device // turns} ns"
        raise Skipped(f"the device waits for the interpreter, which takes {took}")

    def turns(self, size, turns):
        """Nanoseconds of the stream, between events before and after, and of the host until everything was queued."""
        torch, words = self.torch, self.words
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        start = clock()
        first.record()
        for turn in range(turns):
            words(size).fill_(turn)
        last.record()
        host = clock() - start
        last.synchronize()
        return int(first.elapsed_time(last) * 1_000_000), host

    def load(self, name, events, refused):
        self.traces[name] = Trace(events, refused)
        return []

    def trace(self, name):
        """One operation of a pass. The first pass fills the cache, and is not timed."""
        trace = self.traces.get(name)
        if trace is None:
            raise Skipped(f"no trace {name!r} was loaded")
        self.others(trace.streams)
        refused = self.watched_pass(trace) if self.memory not in trace.highest else self.one_pass(trace, trace.operations)[1]
        if trace.refused not in (None, refused):
            # Addresses decide between equal blocks, and the driver chooses the addresses.
            raise Skipped(f"requests refused by torch: {refused}, by ours: {trace.refused}; so the rest is not the same")
        own = median(self.one_pass(trace, trace.without_memory)[0] for _ in range(3))
        taken, refused = self.one_pass(trace, trace.operations)
        # Each request, and the free of each successful one.
        operations = 2 * trace.allocations - refused
        return {"samples_ps": [max(0, taken - own) * 1000 // max(1, operations)], "operations": operations, **trace.highest[self.memory]}

    def watched_pass(self, trace):
        """Records the memory after each operation. Returns the number of failed requests."""
        live, highest, refused = Live(self, trace), {"reserved": 0, "unused": 0}, 0
        for operation in trace.operations:
            refused += live.operate([operation])
            stats = self.torch._C._cuda_memoryStats(self.device.index)
            reserved, allocated = (stats[key]["all"]["current"] for key in ("reserved_bytes", "allocated_bytes"))
            if reserved > highest["reserved"]:
                highest = {"reserved": reserved, "unused": reserved - allocated}
        live.free_what_is_left()
        trace.highest[self.memory] = highest
        return refused

    def one_pass(self, trace, operations):
        """Returns nanoseconds, including the final frees, and the number of failed requests."""
        live = Live(self, trace)
        start = clock()
        refused = live.operate(operations)
        live.free_what_is_left()
        return clock() - start, refused

    def answer(self, request):
        kind = request.get("do")
        if "memory" in request:
            self.limit(request["memory"])
        if kind == "latency":
            return self.latency(request["case"], request["size"], max(1, request.get("batch", 1)))
        if kind == "empty_cache":
            return self.empty_cache(request["segments"], request["size"])
        if kind == "recovery":
            return self.recovery(request["size"])
        if kind == "record_stream":
            return self.record_stream(request["streams"], request["size"], max(1, request.get("batch", 1)))
        if kind == "pipeline":
            return self.pipeline(request["size"], max(1, request.get("turns", 1)))
        if kind == "load":
            return self.load(request["trace"], request["events"], request.get("refused"))
        if kind == "trace":
            return self.trace(request["trace"])
        raise Skipped(f"the request {kind!r} is not known here")


class Live:
    """The live blocks of a pass over a trace."""

    def __init__(self, torch, trace):
        self.torch = torch
        self.left = trace.left
        self.addresses = [0] * len(trace.slots)
        self.tensors = [None] * len(trace.slots)
        self.handles = [stream.cuda_stream for stream in torch.streams]

    def operate(self, operations):
        """Runs these operations and returns the number of failed requests. Freeing address 0 does nothing, so a pass with zero bytes,
        or after a failure, costs the interpreter the same time."""
        torch, addresses, tensors, handles, refused = self.torch, self.addresses, self.tensors, self.handles, 0
        allocate, free, out_of_memory = torch.allocate, torch.free, torch.out_of_memory
        for kind, slot, size, stream in operations:
            if kind == ALLOCATE:
                try:
                    addresses[slot] = allocate(size, handles[stream])
                except out_of_memory:
                    refused += 1
            elif kind == FREE:
                free(addresses[slot])
                addresses[slot] = 0
            elif kind == ALLOCATE_TENSOR:
                try:
                    tensors[slot] = torch.tensor(size, stream)
                except out_of_memory:
                    refused += 1
            elif kind == FREE_TENSOR:
                tensors[slot] = None
            elif kind == RECORD:
                if tensors[slot] is not None:
                    tensors[slot].record_stream(torch.streams[stream])
            else:
                self.other(size, stream)
        return refused

    def other(self, kind, stream):
        torch = self.torch
        if kind == "s":
            torch.streams[stream].synchronize()
        elif kind == "d":
            torch.torch.cuda.synchronize(torch.device)
        elif kind == "e":
            torch.torch.cuda.empty_cache()

    def free_what_is_left(self):
        free, addresses = self.torch.free, self.addresses
        for slot in self.left:
            free(addresses[slot])
        self.tensors.clear()


def say(answer):
    print(json.dumps(answer), flush=True)


def first_line(error):
    return str(error).partition("\n")[0]


def answer(torch, line):
    try:
        given = torch.answer(json.loads(line))
        return given if isinstance(given, dict) else {"samples_ps": given}
    except Skipped as reason:
        return {"skipped": str(reason)}
    except torch.out_of_memory as error:
        # Running out of memory does not mean that the allocator is broken.
        return {"skipped": f"out of memory: {first_line(error)}"}
    except Failed as reason:
        return {"failed": str(reason)}
    except (RuntimeError, LookupError, TypeError, ValueError) as error:
        return {"failed": f"{type(error).__name__}: {first_line(error)}"}
    finally:
        torch.reset()


def main():
    ordinal = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    try:
        torch = Torch(ordinal)
    except ModuleNotFoundError as error:
        return say({"unavailable": f"this Python has no torch ({error})"})
    except (ImportError, OSError) as error:
        # A library that torch needs is missing or incompatible.
        return say({"unavailable": f"torch cannot be imported: {error}"})
    except (Skipped, RuntimeError) as error:
        return say({"unavailable": first_line(error)})
    # A garbage collection during a measurement would be Python's cost, not the allocator's.
    gc.disable()
    note = "called from Python; the interpreter's own time, measured with requests for zero bytes, is taken off"
    say({"arm": "torch", "version": torch.torch.__version__, "note": note})
    for line in sys.stdin:
        say(answer(torch, line))
    return None


if __name__ == "__main__":
    main()
