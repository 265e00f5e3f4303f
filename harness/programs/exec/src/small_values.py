# Describes the operations of PyTorch whose results on small tensors the library computes, although kernels are no-ops: see torch_kernel/small.rs.
import ctypes
import re

import harness_guard as guard
import harness_torch_kernel as torch_kernel
import torch
from torch import library as torch_library

_C = torch._C
# Torch does not use this dispatch key.
_KEY = "Fake"
# All operations with kernels of the GPU are computed, but for these and for those with a generator, of which small/drawn.rs draws some. Results that the
# definition leaves open are not known afterwards.
_UNKNOWN = """
empty empty_strided native_dropout fractional_max_pool2d fractional_max_pool3d linalg_eig linalg_qr geqrf linalg_ldl_factor_ex embedding_bag_forward_only
_assert_async _pin_memory mode max_unpool2d max_unpool3d _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward
""".split()
# Results that the definition leaves open, for example the signs of eigenvectors, by their indices.
_OPEN_RESULTS = {"_linalg_svd": (0, 2), "_linalg_eigh": (1,), "_embedding_bag": (1, 2, 3), "linalg_lstsq": (1, 2, 3)}
# Among equal elements, the GPU may choose other indices; of several writes to an element, another last one. See small/choice.rs.
_TIED = "sort", "topk", "kthvalue", "median", "nanmedian"
_WRITING = "scatter", "index_copy", "index_put", "_index_put_impl", "_unsafe_index_put", "put"
_SUMMING = "index_add", "index_reduce", "scatter_add", "scatter_reduce", "embedding_dense_backward"
_CASTING = "copy_", "_to_copy", "_foreach_copy_"
_SCANNING = "cumsum", "cumprod", "logcumsumexp"
_TIES, _WRITES, _SUMS, _CASTS, _SCANS = range(1, 6)
# They write no values, or consist of others.
_LEFT = """
_efficientzerotensor resize_ set_ record_stream _local_scalar_dense _fused_sdp_choice is_set_to _has_same_storage_numel bernoulli multinomial
""".split()
# Operations that consist of others for each device.
_WINDOWS = "aten::kaiser_window", "aten::kaiser_window.periodic", "aten::kaiser_window.beta"
_COMPOSED = "aten::copy_", "aten::convolution", "aten::mv", "aten::ldexp.Tensor", *_WINDOWS
# They ignore the earlier values of the tensor that they change.
_OVERWRITING = "fill_", "zero_", "copy_", "_foreach_zero_", "_foreach_copy_"
_OVERWRITING_ALL = "_cummax_helper", "_cummin_helper"
# If this flag is set, an optimizer ignores the earlier values of this list.
_FIRST_STEP, _OF_FIRST_STEP = "is_first_step", "momentum_buffer_list"
# The GPU reads the size of the first result in a dimension (the first number among the arguments, or 0), or the result itself.
_READING = "nonzero", "equal", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"
# Arguments that a forward pass changes, which schemas do not say.
_CHANGED = "running_mean", "running_var"
_COMPUTED_KIND, _UNKNOWN_KIND, _READ_KIND, _COPY_KIND = range(4)
# The types of arguments, as `Types` in unboxed.rs reads them. An array of flags has their number as its letter, symbols have `I`, `J`.
_LETTERS = {
    "Tensor": "t",
    "Optional[Tensor]": "o",
    "List[Tensor]": "l",
    "List[Optional[Tensor]]": "p",
    "number": "s",
    "Optional[number]": "q",
    "List[number]": "n",
    "int": "i",
    "Optional[int]": "j",
    "float": "f",
    "Optional[float]": "g",
    "bool": "b",
    "Optional[bool]": "c",
    "ScalarType": "e",
    "Optional[ScalarType]": "y",
    "Optional[Layout]": "y",
    "Optional[MemoryFormat]": "y",
    "Optional[Device]": "d",
    "Optional[Generator]": "G",
    "List[int]": "z",
    "List[SymInt]": "z",
    "Optional[List[int]]": "w",
}
# Functions that `Generators` has, in its order.
_GENERATOR_FUNCTIONS = (
    ("libtorch_cpu.so", "aoti_torch_get_device_index"),
    ("libtorch_cuda.so", "_ZN2at4cuda6detail23getDefaultCUDAGeneratorEa"),
    ("libtorch_cuda.so", "_ZNK2at17CUDAGeneratorImpl12current_seedEv"),
    ("libtorch_cuda.so", "_ZNK2at17CUDAGeneratorImpl24philox_offset_per_threadEv"),
)
_SYMBOL = re.compile(r"\b(SymInt\??) (\w+)")
_kept = []  # Registrations last as long as these objects.


class _Description(ctypes.Structure):
    """`Description` in small.rs"""

    _fields_ = [
        ("names", ctypes.c_char_p * 2),
        *((name, ctypes.c_size_t) for name in ("arguments", "returns")),
        *((name, ctypes.c_uint64) for name in ("changed", "overwritten", "open")),
        *((name, ctypes.c_size_t) for name in ("kind", "choice", "first_step", "is_indexed")),
        ("types", ctypes.c_char_p),
    ]


def _schemas():
    """The overloads of operations with kernels of the GPU. Others consist of operations."""
    names = (name for name in _C._dispatch_get_all_op_names() if name.startswith("aten::"))
    found = {name for name in names if name in _COMPOSED or _C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")}
    for operation in sorted({name.partition(".")[0] for name in found}):
        if operation.partition("::")[2] in _LEFT:
            continue
        for schema in _C._jit_get_schemas_for_operator(operation):
            full_name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
            is_view = any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
            if full_name in found and not is_view:
                yield schema


def _description(schema):
    name = schema.name.partition("::")[2]
    is_backward = "backward" in name
    changed = [
        (argument.alias_info is not None and argument.alias_info.is_write) or (argument.name in _CHANGED and not is_backward) for argument in schema.arguments
    ]
    overwritten = [
        is_changed
        and (
            (argument.is_out and str(argument.real_type) == "Tensor")
            or name in _OVERWRITING_ALL
            or (index == 0 and name in _OVERWRITING)
            or (argument.name == _OF_FIRST_STEP and name == "_fused_sgd_")
        )
        for index, (is_changed, argument) in enumerate(zip(changed, schema.arguments))
    ]
    open_results = _OPEN_RESULTS.get(name, ())
    choice = _TIES if name in _TIED and len(schema.returns) == 2 else 0
    reduces = any(argument.name == "reduce" for argument in schema.arguments)
    if name.rstrip("_") in _WRITING:
        choice = _SUMS if reduces else _WRITES
    if name.rstrip("_") in _SUMMING:
        choice = _SUMS
    if name in _CASTING:
        choice = _CASTS
    if name.rstrip("_") in _SCANNING:
        choice = _SCANS
    if name in _UNKNOWN or (open_results and any(overwritten)) or any(argument.name == "generator" for argument in schema.arguments):
        kind = _UNKNOWN_KIND
    elif name in _READING and not any(changed):
        kind = _READ_KIND
    elif name == "copy_":
        kind = _COPY_KIND
    else:
        kind = _COMPUTED_KIND
    names = [argument.name for argument in schema.arguments]
    first_step = names.index(_FIRST_STEP) if _FIRST_STEP in names else len(names)
    # What they do at an index of their lists depends on no other index. A tensor of scalars is no list.
    kinds = {(argument.name == "scalars", str(argument.real_type)) for argument in schema.arguments}
    is_indexed = name.startswith(("_foreach_", "_fused_")) and (False, "List[Tensor]") in kinds and (True, "Tensor") not in kinds
    bits = lambda indices: sum(1 << index for index in indices)
    of_flags = lambda flags: bits(index for index, flag in enumerate(flags) if flag)
    full_name = (ctypes.c_char_p * 2)(schema.name.encode(), schema.overload_name.encode())
    sizes = len(schema.arguments), len(schema.returns)
    return _Description(full_name, *sizes, of_flags(changed), of_flags(overwritten), bits(open_results), kind, choice, first_step, is_indexed, _types(schema))


def _types(schema):
    """A letter for the type of each argument and one for the results, or None if one has no letter."""
    if schema.name == "aten::cat":
        return None  # Its kernels take an `ITensorListRef`.
    symbols = dict(reversed(found) for found in _SYMBOL.findall(str(schema)))

    def letter(argument):
        if argument.N and str(argument.real_type) == "List[bool]":
            return str(argument.N)
        return {"SymInt": "I", "SymInt?": "J"}.get(symbols.get(argument.name)) or _LETTERS.get(str(argument.real_type))

    letters = [letter(argument) for argument in schema.arguments]
    results = [(str(result.type), result.alias_info is not None and result.alias_info.is_write) for result in schema.returns]
    if all(result == ("Tensor", False) for result in results):
        letters.append("vtTUV"[len(results)] if len(results) < 5 else None)
    else:
        letters.append({("Tensor", True): "r", ("List[Tensor]", False): "l", ("bool", False): "v"}.get(results[0]) if len(results) == 1 else None)
    return None if None in letters else "".join(letters).encode()


def _prepare(library):
    """Prepares the library. Returns the functions of the C++ runtime that it needs, or None if this build of PyTorch lacks a function."""
    try:
        cxx = ctypes.CDLL("libstdc++.so.6")
        others = torch_library.Library("_", "IMPL", _KEY)
        others.m.fallback_fallthrough()
        _kept.append(others)
        key = _C._dispatch_key_parse(_KEY)
        _C._dispatch_tls_set_dispatch_key_included(key, True)
        try:
            _kept.append(torch_kernel.prepare(library, (_KEY,)))
        finally:
            _C._dispatch_tls_set_dispatch_key_included(key, False)
        return [ctypes.cast(getattr(cxx, name), ctypes.c_void_p).value for name in ("__cxa_begin_catch", "__cxa_end_catch")]
    except (AttributeError, OSError):
        return None


class _Generators(ctypes.Structure):
    """`Generators` in small/drawn.rs"""

    _fields_ = [*((name, ctypes.c_void_p) for name in ("device", "default", "seed", "offset")), ("is_old", ctypes.c_bool)]


def _generators():
    """The functions of PyTorch for generators, or None if this build lacks one."""
    try:
        functions = [getattr(ctypes.CDLL(library), name) for library, name in _GENERATOR_FUNCTIONS]
    except (AttributeError, OSError):
        return None
    return _Generators(*(ctypes.cast(function, ctypes.c_void_p) for function in functions), torch.__version__ < (2, 7))


def _watched():
    """Calls of the CPU, each with name and overload of its operation and with what it passes and returns: numbers, and tensors as their number of elements."""
    three, six = torch.ones(3), torch.ones(2, 3)
    two, indices = torch.ones(2), torch.zeros(2, dtype=torch.long)
    return [
        ("clamp", "", " 3 1 2.5 > 3", lambda: torch.clamp(three, 1, max=2.5)),
        ("add_", "Tensor", " 3 3 true > 3", lambda: three.bool().add_(three.bool(), alpha=True)),
        ("sum", "dim_IntList", " 6 [ 1 ] false 7 > 2", lambda: torch.sum(six, [1], dtype=torch.float64)),
        ("var", "correction", " 6 [ 0 ] 1 true > 3", lambda: torch.var(six, [0], correction=1, keepdim=True)),
        ("logit", "", " 3 0.25 > 3", lambda: torch.logit(three, eps=0.25)),
        ("empty", "memory_format", " [ 2 ] 7 none ? false 0 > 2", lambda: torch.empty(2, dtype=torch.float64, device="cpu", memory_format=torch.contiguous_format)),
        ("embedding", "", " 6 2 -1 false true > 6", lambda: torch.embedding(six, indices, sparse=True)),
        ("index", "Tensor", " 3 [ 2 ] > 2", lambda: three[indices]),
        ("nll_loss_forward", "", " 6 2 none 1 -100 > 1 1", lambda: torch.nn.functional.nll_loss(six, indices)),
        ("_cdist_forward", "", " 6 6 2.0 2 > 4", lambda: torch.cdist(six, six, compute_mode="donot_use_mm_for_euclid_dist")),
        ("_foreach_mul_", "ScalarList", " [ 3 2 ] [ 2.0 3 ] >", lambda: torch._foreach_mul_([three, two], [2.0, 3])),
        ("_foreach_sqrt", "", " [ 3 2 ] > 3 2", lambda: torch._foreach_sqrt([three, two])),
        ("uniform_", "", " 3 0.0 1.0 ? > 3", lambda: three.uniform_(generator=torch.Generator())),
        ("std_mean", "correction", " 6 [ 1 ] 0 true > 2 2", lambda: torch.std_mean(six, [1], correction=0, keepdim=True)),
    ]


def _finds_unboxed(library):
    """Returns whether the library finds the arguments and the results of calls as C++ passes them."""
    library.harness_small_watch.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.harness_small_watch.restype = ctypes.c_size_t
    library.harness_small_watched.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    library.harness_small_watched.restype = ctypes.c_bool
    for name, overload, expected, call in _watched():
        schema = next(schema for schema in _C._jit_get_schemas_for_operator(f"aten::{name}") if schema.overload_name == overload)
        names = (ctypes.c_char_p * 2)(schema.name.encode(), overload.encode())
        types = _types(schema)
        # Another version may have a type without a letter.
        function = library.harness_small_watch(names, types) if types is not None else 0
        if not function:
            return False
        try:
            call()
        except RuntimeError:
            pass  # Then nothing is described.
        if not library.harness_small_watched(names, function, expected.encode()):
            return False
    return True


def begin(path):
    """Makes the library at `path` compute operations on small tensors. Returns what is missing in this build of PyTorch, if anything."""
    library = ctypes.PyDLL(path)
    library.harness_small_compute.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    library.harness_small_compute.restype = ctypes.c_bool

    missing = ["values of small tensors"]

    def compute():
        catch = _prepare(library)
        if not catch:
            return
        with torch.no_grad():
            is_unboxed = _finds_unboxed(library)
        generators = _generators()
        if generators:
            library.harness_small_random(ctypes.byref(generators))
        computed = 0
        for schema in _schemas():
            description = _description(schema)
            description.types = description.types if is_unboxed else None
            computed += library.harness_small_compute(ctypes.byref(description), *catch)
        missing[:] = [] if computed and is_unboxed else ["the short way to values of small tensors"] if computed else missing

    # PyTorch may begin with the GPU inside of an operation, whose settings a new thread does not have.
    guard.start_thread(compute)()
    return missing
