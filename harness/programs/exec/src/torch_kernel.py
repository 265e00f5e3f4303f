# Finds the functions and layouts of PyTorch that the library needs to run operations without Python: see torch_kernel.rs.
import ctypes
import functools
import operator

import harness_guard as guard
import torch
from torch import library as torch_library

_C = torch._C
# The first and the last tested version.
TESTED = ["2.9.1", "2.15.0"]
# What `Torch` in torch_kernel.rs needs, in its order: functions of libtorch_cpu.so, an object of libc10.so, and functions of libtorch_cpu.so.
_DISPATCHER = "_ZN3c1010Dispatcher13realSingletonEv", "_ZN3c1010Dispatcher17findSchemaOrThrowEPKcS2_"
_UNDEFINED = "_ZN3c1019UndefinedTensorImpl10_singletonE"
_TENSOR_FUNCTIONS = "get_data_ptr get_dim get_sizes get_strides get_dtype create_tensor_from_blob delete_tensor_object".split()


def _bits(key_set):
    """The set as a number, for PyTorch 2.4, in which only C++ can read it. pybind11 stores the address of the object of C++ after Python's header."""
    return ctypes.c_uint64.from_address(ctypes.c_size_t.from_address(id(key_set) + object.__basicsize__).value).value


def prepare(library, keys_of_python):
    """Prepares the library to run operations without Python. The first key, which the thread includes, and the others are unused by torch. Returns what
    must be kept. Raises an AttributeError if this build of PyTorch lacks a function."""
    if not (2, 4) <= tuple(map(int, torch.__version__.split(".")[:2])) <= (2, 15):
        raise AttributeError
    library.harness_values_probe.restype = ctypes.c_bool
    torch_cpu, c10 = ctypes.CDLL("libtorch_cpu.so"), ctypes.CDLL("libc10.so")
    addressed = lambda functions: [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    found = addressed(getattr(torch_cpu, name) for name in _DISPATCHER)
    found.append(ctypes.addressof(ctypes.c_char.in_dll(c10, _UNDEFINED)))
    found += addressed(getattr(torch_cpu, f"aoti_torch_{name}") for name in _TENSOR_FUNCTIONS)
    found.append(ctypes.cast(getattr(torch_cpu, "aoti_torch_new_tensor_handle", None), ctypes.c_void_p).value or 0)
    bits = getattr(_C.DispatchKeySet, "raw_repr", _bits)
    key_set = lambda *names: functools.reduce(operator.or_, (bits(_C.DispatchKeySet(_C._dispatch_key_parse(name))) for name in names))
    found += key_set("CUDA"), key_set("CPU"), key_set(*keys_of_python, "BackendSelect", "ADInplaceOrView")
    tensor = torch.empty(2, 3)  # Python keeps this operation.
    keys = bits(_C._dispatch_keys(tensor))
    found += keys, keys | key_set("CUDA", "AutogradCUDA", "AutocastCUDA")
    probe = torch_library.Library("harness", "DEF")
    probe.define("probe(Tensor a, float b, int c, bool d, Tensor[] e, Device f, int[] g, Scalar[] h, str i, bool[] j) -> Tensor")
    for key in ("CPU", "CUDA", keys_of_python[0]):
        probe.impl("probe", guard.entry(lambda *arguments: arguments[0]), key)
    if library.harness_values_probe((ctypes.c_uint64 * len(found))(*found), b"harness::probe"):
        torch.ops.harness.probe(tensor, 1.5, 7, True, [tensor], torch.device("cuda:1"), [8, 9], [2.5, 10], "text", [True, False])
    return probe
