# Forked processes that end in all ways without `atexit`. Number n allocates n times 16 MiB and releases it. If n is even, it resets its peaks, or else its counters.
import ctypes
import os
import signal
import sys

import torch

ENDS = [
    lambda: os.kill(os.getpid(), signal.SIGKILL),
    lambda: os.kill(os.getpid(), signal.SIGTERM),
    lambda: ctypes.string_at(0),
    lambda: os._exit(0),
    lambda: ctypes.CDLL(None)._exit(0),
    lambda: os.execv("/bin/true", ["true"]),
    lambda: os.execv(sys.executable, [sys.executable, __file__, "again"]),
    lambda: os.kill(os.getpid(), signal.SIGKILL) if runs_out_of_memory() else None,
]


def runs_out_of_memory():
    try:
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return True


if sys.argv[1:]:
    torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    sys.exit()
for number, end in enumerate(ENDS, 1):
    child = os.fork()
    if child == 0:
        torch.empty(number << 24, dtype=torch.uint8, device="cuda")
        if number % 2 == 0:
            torch.cuda.reset_peak_memory_stats()
        else:
            torch.cuda.reset_accumulated_memory_stats()
        end()
    os.waitpid(child, 0)
    print(number, child)
