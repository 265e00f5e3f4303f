"""Stands for CuPy: a package with its own allocator in C, its own statistics and its own error."""
import ctypes
import os

__version__ = "14.2.0"
_core = ctypes.CDLL(os.path.join(os.path.dirname(__file__), "_core.so"))
_held = []


class OutOfMemoryError(MemoryError):
    __module__ = "cupy.cuda.memory"


class Array:
    def __init__(self, size):
        self.at, self.size = ctypes.c_void_p(), size
        try:
            _request(self.at, size)
        except OutOfMemoryError:
            _request(self.at, size)  # The program does not see the first error.
        _held.append(size)

    def fill(self):
        assert _core.fill(self.at, ctypes.c_size_t(self.size)) == 0

    def __del__(self):
        if self.at:
            _held.remove(self.size)
            _core.release(self.at)


def _request(at, size):
    if _core.allocate(ctypes.byref(at), ctypes.c_size_t(size)):
        raise OutOfMemoryError("Out of memory allocating %d bytes" % size)


class _Pool:
    def used_bytes(self):
        return sum(_held)

    total_bytes = used_bytes

    def malloc(self):
        pass


_pool = _Pool()


def get_default_memory_pool():
    return _pool


class cuda:
    get_allocator = lambda: _pool.malloc

    class Device:
        def __init__(self, number):
            pass

        def __enter__(self):
            pass

        __exit__ = lambda *_: None
