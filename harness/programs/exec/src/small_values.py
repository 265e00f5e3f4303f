# Describes the operations of PyTorch whose results on small tensors the library computes, although kernels are no-ops: see torch_kernel/small.rs.
import ctypes
import threading

import harness_torch_kernel as torch_kernel
import torch
from torch import library as torch_library

_C = torch._C
# Torch does not use this dispatch key.
_KEY = "Fake"
# All overloads, also those that change an argument.
_COMPUTED = """
fill zero copy arange linspace logspace eye tril triu tril_indices triu_indices
abs neg sign sgn signbit ceil floor round trunc frac reciprocal sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh
asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid logit relu leaky_relu elu gelu silu mish hardtanh hardswish hardsigmoid softplus threshold
log_sigmoid_forward clamp clamp_min clamp_max nan_to_num isnan isinf isposinf isneginf logical_not bitwise_not
add sub rsub mul div floor_divide remainder fmod pow maximum minimum fmax fmin atan2 hypot copysign lerp addcmul addcdiv xlogy nextafter gcd lcm
eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift __lshift__ __rshift__
__ilshift__ __irshift__ where masked_fill heaviside
threshold_backward sigmoid_backward tanh_backward gelu_backward silu_backward leaky_relu_backward elu_backward softplus_backward hardtanh_backward
hardswish_backward
sum nansum mean prod max min amax amin aminmax all any argmax argmin norm linalg_vector_norm std var std_mean var_mean logsumexp cumsum cumprod cummax
cummin logcumsumexp count_nonzero median nanmedian _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data
index index_select index_put _index_put_impl index_fill index_add index_copy gather scatter scatter_add scatter_reduce take put masked_select masked_scatter
nonzero equal embedding searchsorted bucketize cat flip roll sort topk kthvalue histc isin trace dot vdot mm mv addmm addmv bmm baddbmm addr cross _cdist_forward
mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward binary_cross_entropy binary_cross_entropy_backward
nll_loss_forward nll_loss_backward
_foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_pow _foreach_sqrt _foreach_neg _foreach_abs _foreach_exp _foreach_log _foreach_reciprocal
_foreach_sign _foreach_zero _foreach_copy _foreach_lerp _foreach_addcmul _foreach_addcdiv _foreach_maximum _foreach_minimum _foreach_clamp_min
_foreach_norm _foreach_max _foreach_clamp_max _foreach_round _foreach_floor _foreach_ceil _foreach_rsqrt
_amp_foreach_non_finite_check_and_unscale _amp_update_scale _fused_sgd _fused_adagrad
""".split()
# Not computed. They change tensors through addresses that launches do not find.
_UNKNOWN = """
uniform normal random bernoulli exponential cauchy log_normal geometric randperm multinomial _fused_adam _fused_adamw
""".split()
# They ignore the earlier values of the tensor that they change.
_OVERWRITING = "fill_", "zero_", "copy_", "_foreach_zero_", "_foreach_copy_"
_COMPUTED_KIND, _UNKNOWN_KIND, _READ_KIND, _COPY_KIND = range(4)
# The types of arguments, as `Types` in unboxed.rs reads them. The kernels of the GPU take integers for symbols.
_LETTERS = {
    "Tensor": "t",
    "Optional[Tensor]": "o",
    "List[Tensor]": "l",
    "List[Optional[Tensor]]": "p",
    "number": "s",
    "Optional[number]": "q",
    "List[number]": "n",
    "int": "i",
    "SymInt": "i",
    "Optional[int]": "j",
    "Optional[SymInt]": "j",
    "float": "f",
    "Optional[float]": "g",
    "bool": "b",
    "Optional[bool]": "c",
    "ScalarType": "e",
    "Optional[ScalarType]": "y",
    "List[int]": "z",
    "List[SymInt]": "z",
    "Optional[List[int]]": "w",
}
_kept = []  # Registrations last as long as these objects.


class _Description(ctypes.Structure):
    """`Description` in small.rs"""

    _fields_ = [
        ("names", ctypes.c_char_p * 2),
        *((name, ctypes.c_size_t) for name in ("arguments", "returns")),
        *((name, ctypes.c_uint64) for name in ("changed", "overwritten")),
        ("kind", ctypes.c_size_t),
        ("types", ctypes.c_char_p),
    ]


def _schemas(name):
    """The overloads of an operation with kernels of the GPU."""
    for schema in _C._jit_get_schemas_for_operator(f"aten::{name}"):
        full_name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        try:
            # Others consist of operations.
            has_kernel = _C._dispatch_has_kernel_for_dispatch_key(full_name, "CUDA") or full_name == "aten::copy_"
        except RuntimeError:
            continue  # An operation of TorchScript alone.
        if has_kernel and "names" not in schema.overload_name and "dimname" not in schema.overload_name:
            yield schema


def _description(schema, kind):
    name = schema.name.partition("::")[2]
    changed = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    overwritten = [
        is_changed and (argument.is_out or (index == 0 and name in _OVERWRITING)) for index, (is_changed, argument) in enumerate(zip(changed, schema.arguments))
    ]
    if name in ("nonzero", "equal") and not any(changed):
        kind = _READ_KIND
    elif name == "copy_":
        kind = _COPY_KIND
    bits = lambda flags: sum(1 << index for index, flag in enumerate(flags) if flag)
    names = (ctypes.c_char_p * 2)(schema.name.encode(), schema.overload_name.encode())
    return _Description(names, len(schema.arguments), len(schema.returns), bits(changed), bits(overwritten), kind, _types(schema))


def _types(schema):
    """A letter for the type of each argument and one for the results, or None if one has no letter."""
    if schema.name == "aten::cat":
        return None  # Its kernels take an `ITensorListRef`.
    letters = [_LETTERS.get(str(argument.real_type)) for argument in schema.arguments]
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
        ("index", "Tensor", " 3 [ 2 ] > 2", lambda: three[indices]),
        ("nll_loss_forward", "", " 6 2 none 1 -100 > 1 1", lambda: torch.nn.functional.nll_loss(six, indices)),
        ("_cdist_forward", "", " 6 6 2.0 2 > 4", lambda: torch.cdist(six, six, compute_mode="donot_use_mm_for_euclid_dist")),
        ("_foreach_mul_", "ScalarList", " [ 3 2 ] [ 2.0 3 ] >", lambda: torch._foreach_mul_([three, two], [2.0, 3])),
        ("_foreach_sqrt", "", " [ 3 2 ] > 3 2", lambda: torch._foreach_sqrt([three, two])),
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
        computed = 0
        for names, kind in ((_COMPUTED, _COMPUTED_KIND), (_UNKNOWN, _UNKNOWN_KIND)):
            for name in names:
                for schema in [*_schemas(name), *_schemas(name + "_")]:
                    description = _description(schema, kind)
                    description.types = description.types if is_unboxed else None
                    computed += library.harness_small_compute(ctypes.byref(description), *catch)
        missing[:] = [] if computed and is_unboxed else ["the short way to values of small tensors"] if computed else missing

    # PyTorch may begin with the GPU inside of an operation, whose settings a new thread does not have.
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    return missing
