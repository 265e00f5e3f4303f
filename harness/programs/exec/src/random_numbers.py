# What PyTorch's kernels for a GPU make of random numbers, for `cpu_values`. The library of the simulated GPU draws the numbers.
#
# The formulas are those of PyTorch's transformations of uniform numbers. `sin`, `cos`, `log` and the like round as on the CPU, so the last digits can differ.
import ctypes
import math

import torch

_UNIFORM, _UNIFORM_DOUBLE, _NORMAL, _NORMAL_DOUBLE = range(4)
_TYPES = torch.float32, torch.float64, torch.float32, torch.float64
# `Distribution` and scalar types in distributions.rs.
_OF_UNIFORM, _OF_NORMAL, _OF_LOG_NORMAL, _OF_CAUCHY, _OF_EXPONENTIAL, _OF_GEOMETRIC, _OF_BERNOULLI, _OF_INTEGERS = range(8)
_SCALAR_TYPES = dict(zip((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64), range(8)))
_SCALAR_TYPES |= {torch.bool: 11, torch.bfloat16: 15}
_IS_OLD = torch.__version__ < (2, 7)
_State = ctypes.c_uint64 * 2
# Threads of a block.
_BLOCK, _BLOCK_OF_SAMPLES = 256, 128


class _Filling(ctypes.Structure):
    """`Filling` in distributions.rs"""

    _fields_ = [
        ("distribution", ctypes.c_size_t),
        ("scalar_type", ctypes.c_int32),
        ("is_long", ctypes.c_bool),
        ("threads", ctypes.c_size_t),
        ("state", _State),
        ("parameters", ctypes.c_double * 2),
        ("least", ctypes.c_int64),
        ("count", ctypes.c_uint64),
    ]


class Numbers:
    """The numbers of a generator's state."""

    gpu = None  # The library of the simulated GPU.

    def __init__(self, seed, offset):
        self.seed, self.offset = seed, offset

    def __call__(self, kind, count, neighbours=1, threads=None):
        """Returns numbers of a kind."""
        into = torch.empty(count, dtype=_TYPES[kind])
        self.gpu.harness_values_random(kind, neighbours, threads or _threads(count), self.seed, self.offset, into.data_ptr(), count)
        return into

    def fill(self, tensor, distribution, *parameters, least=0, count=0, is_long=False):
        """Fills a tensor as a kernel does, which numbers the elements by their addresses."""
        into = torch.empty(tensor.numel(), dtype=tensor.dtype)
        state = self.seed, self.offset
        filling = _Filling(distribution, _SCALAR_TYPES[tensor.dtype], is_long, _threads(len(into)), state, parameters, least, count)
        self.gpu.harness_values_fill(ctypes.byref(filling), into.data_ptr(), len(into), into.element_size())
        return _store(tensor, into)

    def after_heads(self, count):
        """Returns the numbers of FlashAttention after those of `count` heads."""
        return Numbers(self.seed, self.offset + 32 * count)

    def normal(self, tensor):
        return self(_NORMAL_DOUBLE if tensor.dtype == torch.float64 else _NORMAL, tensor.numel())

    @classmethod
    def of(cls, seed, offset):
        """Returns the numbers of a state in tensors."""
        return cls(*(int(number.flatten()[0]) for number in (seed, offset)))

    def state(self):
        seed = ctypes.c_int64(self.seed).value  # A tensor has no larger integers.
        return torch.tensor(seed), torch.tensor(self.offset)

    def kept_by(self, is_flash):
        """Returns a function of scores (sequences × heads × queries × keys). It returns which of them FlashAttention keeps, or the memory-efficient attention."""

        def efficient(scores, dropout):
            return self(_UNIFORM, scores.numel(), threads=1).view(scores.shape) > dropout

        def flash(scores, dropout):
            into = torch.empty(scores.shape, dtype=torch.uint8)
            self.gpu.harness_values_flash(self.seed, self.offset, scores.shape[0] * scores.shape[1], *scores.shape[2:], into.data_ptr())
            return into <= math.floor((1 - dropout) * 255)

        return flash if is_flash else efficient


def _threads(count):
    """The threads of most kernels: one per element, but at most as many as the GPU runs at once."""
    gpu = torch.cuda.get_device_properties(0)
    return min(-(-count // _BLOCK) * _BLOCK, gpu.multi_processor_count * gpu.max_threads_per_multi_processor)


def begin(library):
    """Draws from this library."""
    size, number, address = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p
    library.harness_values_random.argtypes = [size, size, size, number, number, address, size]
    library.harness_values_fill.argtypes = [address, address, size, size]
    library.harness_values_permutation.argtypes = [address, size, address, size, ctypes.c_bool]
    library.harness_values_flash.argtypes = [number, number, size, size, size, address]
    Numbers.gpu = library


def _store(tensor, numbers):
    """Kernels number the elements of a tensor by their addresses."""
    by_address = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    by_address.copy_(numbers.view(by_address.shape))
    return tensor


def _uniform(draw, tensor, start=0.0, end=1.0):
    return draw.fill(tensor, _OF_UNIFORM, start, end)


def _normal(draw, tensor, mean=0.0, std=1.0):
    if tensor.is_complex():
        return _normal(draw, torch.view_as_real(tensor), mean, std / math.sqrt(2))
    return draw.fill(tensor, _OF_NORMAL, mean, std)


def _normal_of(draw, mean, std=1.0):
    like = torch.broadcast_tensors(*(value for value in (mean, std) if isinstance(value, torch.Tensor)))[0]
    return draw.normal(like).view(like.shape).to(like.dtype).mul_(std).add_(mean)


def _log_normal(draw, tensor, mean=1.0, std=2.0):
    return draw.fill(tensor, _OF_LOG_NORMAL, mean, std)


def _cauchy(draw, tensor, median=0.0, sigma=1.0):
    return draw.fill(tensor, _OF_CAUCHY, median, sigma)


def _geometric(draw, tensor, p):
    return draw.fill(tensor, _OF_GEOMETRIC, p)


def _exponential(draw, tensor, rate=1.0):
    return draw.fill(tensor, _OF_EXPONENTIAL, rate)


def _bernoulli(draw, tensor, p=0.5):
    return draw.fill(tensor, _OF_BERNOULLI, p)


def _bernoulli_of(draw, tensor, p):
    return tensor.copy_(draw(_UNIFORM, tensor.numel(), 4, tensor.numel()).view(tensor.shape) <= p)


def _random(draw, tensor):
    dtype = tensor.dtype
    if dtype.is_floating_point:
        below = (1 << {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]) + 1
    else:
        below = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
    return draw.fill(tensor, _OF_INTEGERS, count=below, is_long=dtype in (torch.float64, torch.int64))


def _random_from(draw, tensor, start, end):
    if end is None:  # All numbers of 64 bits.
        return draw.fill(tensor, _OF_INTEGERS, is_long=True)
    count = end - start
    is_long = tensor.dtype != torch.int32 and count >= 1 << 32 if _IS_OLD else count >= 1 << 28
    return draw.fill(tensor, _OF_INTEGERS, least=start, count=count, is_long=is_long)


def _neighbours(tensor):
    """The neighbouring elements that a thread of dropout handles."""
    if torch.empty_like(tensor).stride() != tensor.stride():
        return 1
    size = tensor.element_size()
    most = 4 if _IS_OLD else 16 // size
    return next((width for width in (8, 4, 2) if width <= most and tensor.numel() % width == 0 and tensor.data_ptr() % (width * size) == 0), 1)


def _dropout(draw, tensor, p, train):
    if train is False or tensor.numel() == 0:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(tensor), torch.zeros_like(tensor, dtype=torch.bool)
    neighbours = _neighbours(tensor)
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    chance = torch.tensor(1 - p, dtype=dtype)
    numbers = draw(_UNIFORM, tensor.numel(), neighbours) < chance
    kept = torch.empty_like(tensor, dtype=torch.bool)
    # Without neighbours, a kernel numbers the elements by their indices.
    kept = _store(kept, numbers) if neighbours > 1 else kept.copy_(numbers.view(kept.shape))
    return (tensor.to(dtype) * kept * (1 / chance)).to(tensor.dtype), kept


def _permutation(draw, n, out=None, **_):
    order = torch.empty(n, dtype=torch.int64)
    draw.gpu.harness_values_permutation(_State(draw.seed, draw.offset), _threads(n), order.data_ptr(), n, _IS_OLD)
    return order if out is None else out.copy_(order)


def _multinomial(draw, weights, count, replacement=False):
    if count == 1 or not replacement:
        chances = weights / _exponential(draw, torch.empty(weights.shape, dtype=weights.dtype))
        return chances.argmax(-1, keepdim=True) if count == 1 else chances.topk(count).indices
    distributions = weights.reshape(-1, weights.shape[-1])
    per_row = -(-count // _BLOCK_OF_SAMPLES) * _BLOCK_OF_SAMPLES
    # Each thread draws four numbers and uses the first.
    count_of_threads = per_row * len(distributions)
    numbers = draw(_UNIFORM, 4 * count_of_threads, 4, count_of_threads)[::4].view(-1, per_row)[:, :count]
    sums = (distributions / distributions.sum(-1, keepdim=True)).cumsum(-1)
    found = torch.searchsorted(sums, numbers.to(sums.dtype).contiguous()).clamp_(max=weights.shape[-1] - 1)
    return found.view(*weights.shape[:-1], count)


# By name, or by name and overload.
OPERATIONS = {
    "uniform_": _uniform,
    "normal_": _normal,
    "normal.Tensor_float": _normal_of,
    "normal.float_Tensor": _normal_of,
    "normal.Tensor_Tensor": _normal_of,
    "log_normal_": _log_normal,
    "cauchy_": _cauchy,
    "geometric_": _geometric,
    "exponential_": _exponential,
    "bernoulli_.float": _bernoulli,
    "bernoulli_.Tensor": _bernoulli_of,
    "random_": _random,
    "random_.from": _random_from,
    "random_.to": lambda draw, tensor, end: _random_from(draw, tensor, 0, end),
    "native_dropout": _dropout,
    **dict.fromkeys(("randperm", "randperm.generator", "randperm.out", "randperm.generator_out"), _permutation),
    "multinomial": _multinomial,
}
