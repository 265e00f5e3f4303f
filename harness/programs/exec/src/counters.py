# How a process uses its GPUs: the counters that the library keeps in a mapped file (gpu/settings/src/counters.rs). The hook and the pytest plugin read them.
import collections
import os
import struct
from io import open  # The program may replace that of `builtins`.

# The file begins with seven words: mark, devices, memory, submitted, memory reads, uncomputed reads and waits of frees.
_DEVICES_AT, _MOST_DEVICES = 56, 120
_SUBMITTED, _UNCOMPUTED_READS, _WAITS_OF_FREES = 3, 5, 6
# Bytes in use, their peak, requests, frees, failures, injected ones, and the peak since `restart_peaks`.
Device = collections.namedtuple("Device", "used peak requests frees failed injected recent_peak")
_DEVICE_BYTES = 8 * len(Device._fields)
_RECENT_PEAK_AT = 8 * Device._fields.index("recent_peak")
Counters = collections.namedtuple("Counters", "submitted uncomputed_reads waits_of_frees devices")


def path(folder, pid=None):
    return os.path.join(folder, "%d.counters" % (pid or os.getpid()))


def submitted(file):
    """The number of work items that the process of an open file of counters has submitted."""
    return int.from_bytes(os.pread(file, 8, 8 * _SUBMITTED), "little")


def read(folder, pid=None):
    """The counters of a process, with the devices that it has requested memory of; None before its first use of a GPU."""
    try:
        with open(path(folder, pid), "rb") as file:
            words = file.read(_DEVICES_AT + _MOST_DEVICES * _DEVICE_BYTES)
    except FileNotFoundError:
        return None
    if len(words) < _DEVICES_AT:
        return None
    head = struct.unpack_from("7Q", words)
    devices = map(Device._make, struct.iter_unpack("%dQ" % len(Device._fields), words[_DEVICES_AT : len(words) - (len(words) - _DEVICES_AT) % _DEVICE_BYTES]))
    return Counters(head[_SUBMITTED], head[_UNCOMPUTED_READS], head[_WAITS_OF_FREES], {index: device for index, device in enumerate(devices) if device.requests})


def restart_peaks(folder, pid=None):
    """Lets the recent peaks of a process begin at what it uses."""
    found = read(folder, pid)
    if found:
        with open(path(folder, pid), "r+b", buffering=0) as file:
            for index, device in found.devices.items():
                file.seek(_DEVICES_AT + index * _DEVICE_BYTES + _RECENT_PEAK_AT)
                file.write(struct.pack("Q", device.used))
