"""Makes the snapshots beside it: one small state of PyTorch's allocator in all forms that the reader accepts. Python 3.11 wrote the files that are there.

Not made here: `written.pickle` is `cpp.pickle` read and written again by our writer, and `written.txt` is what `torch.cuda._memory_viz` of PyTorch 2.11 says of
it. Where the writer changes, both are to be made again where that PyTorch is installed: `viewer.py` says it.
"""

import gzip
import pickle
import struct
from pathlib import Path

FOLDER = Path(__file__).parent
MIB = 1 << 20
START = 0x7F0000000000

MAIN = {"name": "<module>", "filename": "/srv/train.py", "line": 41}
STEP = {"name": "step", "filename": "/srv/modèle.py", "line": 7}
# torch.compile adds keys to frames; an unsymbolized frame has an address that is no line.
COMPILED = {"name": "call", "filename": "/tmp/torchinductor/ab.py", "line": 99, "fx_node_op": "call_function", "fx_node_name": "addmm"}
LIBRARY = {"name": "??", "filename": "libtorch.so", "line": 1 << 40}
ALLOCATED = [STEP, MAIN]
OTHER = [COMPILED, LIBRARY, MAIN]


def block(address, size, requested, state, frames):
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}


def segment(address, size, stream, kind, pool, expandable, frames, blocks):
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": sum(b["size"] for b in blocks if b["state"] == "active_allocated"),
        "active_size": sum(b["size"] for b in blocks if b["state"] != "inactive"),
        "requested_size": sum(b["requested_size"] for b in blocks if b["state"] != "inactive"),
        "stream": stream,
        "segment_type": kind,
        "segment_pool_id": pool,
        "is_expandable": expandable,
        "frames": frames,
        "blocks": blocks,
    }


def event(action, addr, size, stream, time_us, frames, pool=(0, 0)):
    addr_key = "device_free" if action == "oom" else "addr"
    entry = {"action": action, addr_key: addr, "size": size, "stream": stream, "time_us": time_us}
    entry |= {"compile_context": "N/A", "user_metadata": "", "pool_id": pool}
    if action != "snapshot":
        entry["frames"] = frames
    return entry


def snapshot():
    small, large, graph, mapped = START, START + 2 * MIB, START + 32 * MIB, 0x200000000000
    side = 0x5581A0C0
    time = 1795166450042919
    segments = [
        segment(small, 2 * MIB, 0, "small", (0, 0), False, ALLOCATED, [
            block(small, 1024, 1000, "active_allocated", ALLOCATED),
            block(small + 1024, 512, 4, "active_pending_free", OTHER),
            block(small + 1536, 2 * MIB - 1536, 0, "inactive", []),
        ]),
        segment(large, 20 * MIB, side, "large", (0, 0), False, [], [
            block(large, 12 * MIB, 12 * MIB - 3, "inactive", []),
            block(large + 12 * MIB, 8 * MIB, 8 * MIB, "active_allocated", OTHER),
        ]),
        segment(graph, 2 * MIB, 0, "small", (0, 1), False, OTHER, [block(graph, 2 * MIB, 5, "inactive", [])]),
        segment(mapped, 40 * MIB, 0, "large", (3, 0), True, [], [block(mapped, 40 * MIB, 40 * MIB - 9, "active_allocated", [])]),
    ]
    trace = [
        event("segment_alloc", small, 2 * MIB, 0, time, ALLOCATED),
        event("alloc", small, 1000, 0, time + 1, ALLOCATED),
        event("segment_alloc", large, 20 * MIB, side, time + 2, []),
        event("alloc", large, 12 * MIB - 3, side, time + 3, OTHER),
        event("alloc", large + 12 * MIB, 8 * MIB, side, time + 4, OTHER),
        event("segment_alloc", graph, 2 * MIB, 0, time + 5, OTHER, (0, 1)),
        event("segment_map", mapped, 40 * MIB, 0, time + 6, []),
        event("alloc", mapped, 40 * MIB - 9, 0, time + 7, [], (3, 0)),
        event("alloc", small + 1024, 4, 0, time + 8, OTHER),
        event("free_requested", small + 1024, 4, 0, time + 9, OTHER),
        event("free_requested", large, 12 * MIB - 3, side, time + 10, []),
        event("free_completed", large, 12 * MIB - 3, side, time + 10, []),
        event("snapshot", 0, 0, 0, time + 11, []),
        event("segment_alloc", START + 99 * MIB, 2 * MIB, 0, time + 12, []),
        event("segment_free", START + 99 * MIB, 2 * MIB, 0, time + 13, []),
        event("segment_map", mapped + 40 * MIB, 2 * MIB, 0, time + 14, []),
        event("segment_unmap", mapped + 40 * MIB, 2 * MIB, 0, time + 15, []),
        event("oom", 3 * MIB, 1 << 33, 0, time + 16, ALLOCATED),
    ]
    return {
        "segments": segments,
        "device_traces": [trace, []],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,garbage_collection_threshold:0.8",
            "max_split_size": 128 * MIB,
            "garbage_collection_threshold": 0.8,
            "expandable_segments": False,
            "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False,
            "roundup_power2_divisions": {str(1 << power): 0 for power in range(16)},
        },
        "external_annotations": [
            {"stage": "START", "name": "Optimizer.step#SGD.step", "device": 0, "time_us": time + 4},
            {"stage": "END", "name": "Optimizer.step#SGD.step", "device": 0, "time_us": time + 9},
        ],
        "rank": 3,
        "host": {"names": ["a", "b"], "load": (0.5, None, True), "big": 1 << 90},
    }


class CppPickler:
    """The form of torch/csrc/jit/serialization/pickler.cpp: protocol 2, numbers given after an object is complete, no batches."""

    def __init__(self):
        self.out, self.memo = bytearray(b"\x80\x02"), {}

    def put(self, key, value):
        number = len(self.memo)
        self.memo[key] = (number, value)
        self.out += b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number)

    def get(self, key):
        number = self.memo[key][0]
        self.out += b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)

    def save(self, value):
        key = value if isinstance(value, str) else id(value)
        if isinstance(value, (str, list, dict)) and key in self.memo:
            return self.get(key)
        if isinstance(value, bool):
            self.out += b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            if 0 <= value < 256:
                self.out += b"K" + bytes([value])
            elif 0 <= value < 65536:
                self.out += b"M" + struct.pack("<H", value)
            elif -(1 << 31) <= value < 1 << 31:
                self.out += b"J" + struct.pack("<i", value)
            else:
                self.out += b"\x8a\x08" + struct.pack("<q", value)
        elif isinstance(value, float):
            self.out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            self.out += b"X" + struct.pack("<I", len(value.encode())) + value.encode()
            self.put(key, value)
        elif isinstance(value, tuple):
            for item in value:
                self.save(item)
            self.out += b"\x86"
        elif isinstance(value, list):
            self.out += b"]("
            for item in value:
                self.save(item)
            self.out += b"e"
            self.put(key, value)
        elif isinstance(value, dict):
            self.out += b"}("
            for name, item in value.items():
                self.save(name)
                self.save(item)
            self.out += b"u"
            self.put(key, value)
        else:
            raise TypeError(value)

    def dump(self, value):
        self.save(value)
        return bytes(self.out + b".")


def old(whole):
    """As PyTorch 2.0 had it: no settings, no addresses of blocks, owners in `history`, the other word for a pending free, no times."""
    segments = []
    for seg in whole["segments"]:
        seg = {key: value for key, value in seg.items() if key not in ("segment_pool_id", "is_expandable", "frames")}
        blocks = []
        for entry in seg["blocks"]:
            state = "active_awaiting_free" if entry["state"] == "active_pending_free" else entry["state"]
            new = {"size": entry["size"], "state": state}
            if state != "inactive":
                owner = {"addr": entry["address"], "real_size": entry["requested_size"], "frames": entry["frames"]}
                new["history"] = [owner, dict(owner, frames=[MAIN])]
            blocks.append(new)
        segments.append(dict(seg, blocks=blocks))
    keep = ("action", "addr", "device_free", "size", "stream", "frames")
    traces = [[{key: value for key, value in entry.items() if key in keep} for entry in trace] for trace in whole["device_traces"]]
    mark = {"action": "user_defined", "addr": 0, "size": 0, "stream": 0, "time_us": 5, "frames": [{"name": "START", "filename": "## forward ##", "line": 0}]}
    traces[0] += [mark, {"action": "defragment", "addr": 0, "size": 0, "stream": 0}]
    return {"segments": segments, "device_traces": traces}


def main():
    whole = snapshot()
    for protocol in range(2, 6):
        # Older protocols call code for bytes and sets.
        new = {"tag": b"\x00\xff", "kinds": {"x"}} if protocol >= 4 else {}
        (FOLDER / f"protocol{protocol}.pickle").write_bytes(pickle.dumps(whole | new, protocol=protocol))
    (FOLDER / "packed.pickle.gz").write_bytes(gzip.compress(pickle.dumps(whole, protocol=4), mtime=0))
    plain = {key: value for key, value in whole.items() if key not in ("rank", "host")}
    (FOLDER / "cpp.pickle").write_bytes(CppPickler().dump(plain))
    (FOLDER / "segments.pickle").write_bytes(pickle.dumps(whole["segments"], protocol=4))
    (FOLDER / "old.pickle").write_bytes(pickle.dumps(old(whole), protocol=4))


main()
