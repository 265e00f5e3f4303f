# What PyTorch's kernels for a GPU make of random numbers, for `cpu_values`. The library of the simulated GPU draws the numbers.
#
# The formulas are those of PyTorch's transformations of uniform numbers. `sin`, `cos`, `log` and the like round as on the CPU, so the last digits can differ.
import ctypes
import math

import torch

_WORDS, _LONG_WORDS, _UNIFORM, _UNIFORM_DOUBLE, _NORMAL, _NORMAL_DOUBLE = range(6)
_TYPES = torch.int32, torch.int64, torch.float32, torch.float64, torch.float32, torch.float64
_IS_OLD = torch.__version__ < (2, 7)
# Of ranges from this size on, numbers have 64 bits.
_LONG_RANGE = 1 << 32 if _IS_OLD else 1 << 28
# Threads of a block.
_BLOCK, _BLOCK_OF_SAMPLES = 256, 128


class Numbers:
    """The numbers of a generator's state."""

    gpu = None  # The library of the simulated GPU.

    def __init__(self, seed, offset):
        self.seed, self.offset = seed, offset

    def __call__(self, kind, count, neighbours=1, threads=None, below=0):
        """Returns numbers of a kind, or integers below a bound if it is not 0."""
        into = torch.empty(count, dtype=_TYPES[kind])
        self.gpu.harness_values_random(kind, neighbours, threads or _threads(count), self.seed, self.offset, below, into.data_ptr(), count)
        return into

    def after(self, count, per_draw):
        """Returns the numbers after a kernel drew `count`, `per_draw` at a time."""
        return Numbers(self.seed, self.offset + 4 * -(-count // (_threads(count) * per_draw)))

    def after_heads(self, count):
        """Returns the numbers of FlashAttention after those of `count` heads."""
        return Numbers(self.seed, self.offset + 32 * count)

    def uniform(self, tensor):
        return self(_UNIFORM_DOUBLE if tensor.dtype == torch.float64 else _UNIFORM, tensor.numel())

    def normal(self, tensor):
        return self(_NORMAL_DOUBLE if tensor.dtype == torch.float64 else _NORMAL, tensor.numel())

    def integers(self, count, below, is_long):
        return self(_LONG_WORDS, count, below=below) if is_long else self(_WORDS, count, below=below).to(torch.int64) & 0xFFFF_FFFF

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
    library.harness_values_random.argtypes = [size, size, size, number, number, number, address, size]
    library.harness_values_flash.argtypes = [number, number, size, size, size, address]
    Numbers.gpu = library


def _store(tensor, numbers):
    """Kernels number the elements of a tensor by their addresses."""
    by_address = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    by_address.copy_(numbers.view(by_address.shape))
    return tensor


def _scaled(numbers, factor, summand):
    """A GPU rounds only the sum."""
    return (numbers.double() * factor + summand).to(numbers.dtype) if summand else numbers * factor


def _uniform(draw, tensor, start=0.0, end=1.0):
    start, end = (float(torch.tensor(bound, dtype=tensor.dtype)) for bound in (start, end))
    numbers = _scaled(draw.uniform(tensor), end - start, start).to(tensor.dtype)
    return _store(tensor, numbers.masked_fill_(numbers == end, start))


def _normal(draw, tensor, mean=0.0, std=1.0):
    if tensor.is_complex():
        return _normal(draw, torch.view_as_real(tensor), mean, std / math.sqrt(2))
    return _store(tensor, _scaled(draw.normal(tensor), std, mean))


def _normal_of(draw, mean, std=1.0):
    like = torch.broadcast_tensors(*(value for value in (mean, std) if isinstance(value, torch.Tensor)))[0]
    return draw.normal(like).view(like.shape).to(like.dtype).mul_(std).add_(mean)


def _log_normal(draw, tensor, mean=1.0, std=2.0):
    return _store(tensor, _scaled(draw.normal(tensor), std, mean).exp_())


def _cauchy(draw, tensor, median=0.0, sigma=1.0):
    numbers = draw.uniform(tensor)
    epsilon = torch.finfo(numbers.dtype).eps
    return _store(tensor, torch.tan(math.pi * (numbers.clamp_(epsilon, 1 - epsilon) - 0.5)) * sigma + median)


def _geometric(draw, tensor, p):
    return _store(tensor, (draw.uniform(tensor).log_() / math.log1p(-p)).ceil_())


def _exponential_numbers(draw, tensor, rate):
    numbers = draw.uniform(tensor)
    epsilon = torch.finfo(numbers.dtype).eps / 2
    return torch.where(numbers >= 1 - epsilon, -epsilon, numbers.log()).mul_(-1 / rate)


def _exponential(draw, tensor, rate=1.0):
    return _store(tensor, _exponential_numbers(draw, tensor, rate))


def _bernoulli(draw, tensor, p=0.5):
    return _store(tensor, draw.uniform(tensor) < p)


def _bernoulli_of(draw, tensor, p):
    return tensor.copy_(draw(_UNIFORM, tensor.numel(), 4, tensor.numel()).view(tensor.shape) <= p)


def _random(draw, tensor):
    dtype = tensor.dtype
    if dtype.is_floating_point:
        below = (1 << {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]) + 1
    else:
        below = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
    return _store(tensor, draw.integers(tensor.numel(), below, dtype in (torch.float64, torch.int64)))


def _random_from(draw, tensor, start, end):
    if end is None:  # All numbers of 64 bits.
        return _store(tensor, draw.integers(tensor.numel(), 0, True))
    return _store(tensor, draw.integers(tensor.numel(), end - start, end - start >= _LONG_RANGE) + start)


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
    out = torch.empty(n, dtype=torch.int64) if out is None else out
    if n == 0:
        return out
    # So many bits that most permutations have no equal keys.
    bits = min(64, math.ceil(math.log2(n - (6 * n * n + 1) / (12 * math.log(0.9)))))
    is_long = bits > 32
    keys = draw.integers(n, (1 << (64 if is_long else 32)) - 1, True)
    if bits < 64:
        keys &= (1 << bits) - 1
    keys, order = keys.sort(stable=True)
    for first, count in _runs(keys):
        # A second kernel shuffles the places of equal keys. The thread of the first place draws for all.
        words = draw.after(n, 2)(_WORDS, 4 * first + 4, 4, n)[4 * first :].to(torch.int64) & 0xFFFF_FFFF
        for last, word in zip(range(count - 1, 0, -1), words.tolist()):
            other = word % (last + 1)
            order[[first + last, first + other]] = order[[first + other, first + last]]
    return out.copy_(order)


def _runs(keys):
    """The first places and lengths of the runs of equal keys."""
    _, counts = torch.unique_consecutive(keys, return_counts=True)
    ends = counts.cumsum(0)
    return [(int(ends[run] - counts[run]), int(counts[run])) for run in torch.nonzero(counts > 1).flatten()]


def _multinomial(draw, weights, count, replacement=False):
    if count == 1 or not replacement:
        chances = weights / _exponential_numbers(draw, weights, 1.0).to(weights.dtype).view(weights.shape)
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
