# Random numbers of small tensors, as a GPU draws them. Those of `published` are in public reports of programs on GPUs.
import json, torch

F, cuda = torch.nn.functional, dict(device="cuda")
TYPES = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool


def drawn(draw, seed=3):
    torch.manual_seed(seed)
    found = draw()
    tensors = found if isinstance(found, (tuple, list)) else [found]
    return [[round(float(number), 3) for number in tensor.flatten().tolist()] for tensor in tensors]


def empty(*sizes, dtype=torch.float32):
    return torch.empty(sizes, dtype=dtype, device="cuda")


def generated(draw):
    """What a generator draws, and what the default one draws then."""
    generator = torch.Generator("cuda").manual_seed(11)
    return [draw(generator), draw(generator), torch.rand(2, **cuda)]


def after_large():
    """What follows fills of large tensors, which move on the generator."""
    torch.rand(5_000_000, **cuda), F.dropout(torch.ones(1000, **cuda)), torch.randperm(1000, **cuda)
    return torch.rand(3, **cuda)


def restored():
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, **cuda)
    torch.cuda.set_rng_state(state)
    return torch.equal(first, torch.rand(3, **cuda))


def gradient():
    x = torch.ones(6, requires_grad=True, **cuda)
    (F.dropout(x, 0.5) * torch.rand(6, **cuda)).sum().backward()
    return x.grad


def strided():
    """A transposed tensor, and columns of a larger one."""
    large = torch.zeros(4, 6, **cuda)
    large[:, ::2].uniform_()
    return [empty(3, 4).t().uniform_(), large, torch.rand_like(empty(2, 3).t()), empty(2, 2, 2, 2).contiguous(memory_format=torch.channels_last).normal_()]


def inferred():
    """Without autograd, operations that consist of others begin there."""
    with torch.inference_mode():
        ones, model = torch.ones(5, **cuda), torch.nn.Dropout2d(0.5)
        return [F.dropout(ones), F.dropout(ones.clone(), inplace=True), F.alpha_dropout(ones, 0.5, True), model(torch.ones(1, 4, 2, 1, **cuda))]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand(1, **cuda)


def in_backward():
    x = torch.ones(1, requires_grad=True, **cuda)
    Twice.apply(x).backward()
    return x.grad


half = torch.full((4,), 0.5, **cuda)
weights = torch.tensor([0.1, 0.2, 0.3, 0.4], **cuda)
found = {
    "published": [drawn(lambda: torch.rand(10, **cuda), 0), drawn(lambda: torch.randn(4, **cuda), 0)],
    "uniform": [drawn(lambda: empty(3, dtype=of).uniform_(-0.1, 0.3)) for of in TYPES[:4]],
    "normal": [drawn(lambda: empty(3, dtype=of).normal_(1, 2)) for of in TYPES[:4]],
    "complex": drawn(lambda: torch.view_as_real(torch.randn(3, dtype=torch.complex64, **cuda))),
    "integers": [drawn(lambda: empty(3, dtype=of).random_()) for of in TYPES],
    "in a range": [drawn(lambda: empty(3, dtype=of).random_(0, 2)) for of in TYPES] + [drawn(lambda: torch.randint(-5, 5, (4,), **cuda))],
    "long": [drawn(lambda: empty(2, dtype=torch.int64).random_(1 << 33)), drawn(lambda: empty(2, dtype=torch.int64).random_(-(1 << 63), None))],
    "flags": [drawn(lambda: empty(6, dtype=of).bernoulli_(0.3)) for of in TYPES] + [drawn(lambda: torch.bernoulli(half)), drawn(lambda: torch.bernoulli(half, 0.25))],
    "other": [drawn(lambda: draw(empty(3))) for draw in (torch.Tensor.exponential_, torch.Tensor.log_normal_, torch.Tensor.cauchy_, lambda x: x.geometric_(0.2))],
    "dropout": [drawn(lambda: torch.native_dropout(torch.arange(1.0, 9, dtype=of, **cuda), 0.25, True)) for of in TYPES[:4]],
    "neighbours": drawn(lambda: [F.dropout(torch.arange(1.0, 1 + count, **cuda)) for count in (2, 3, 6, 7)]),
    "of slices": drawn(lambda: F.dropout(torch.arange(1.0, 17, **cuda).view(4, 4)[:, 1:3])),
    "modules": drawn(lambda: [torch.nn.Dropout1d(0.5)(torch.ones(1, 4, 2, **cuda)), F.alpha_dropout(half, 0.5, True)]),
    "permutations": [drawn(lambda: torch.randperm(count, **cuda)) for count in (0, 1, 2, 7, 50)] + [drawn(lambda: torch.randperm(10, **cuda), 10)],
    "choices": drawn(lambda: [torch.multinomial(weights, 1), torch.multinomial(weights, 3), torch.multinomial(weights.view(2, 2), 1, replacement=True)]),
    "of tensors": drawn(lambda: [torch.normal(weights, half), torch.normal(weights, 2.0), torch.normal(2.0, weights), torch.distributions.Normal(weights, 1.0).sample((2,))]),
    "like": drawn(lambda: [torch.rand_like(half), torch.randn_like(half, dtype=torch.float64), torch.randint_like(half, 9), torch.rand(2, 2, out=empty(4))]),
    "generators": drawn(lambda: generated(lambda generator: torch.rand(2, generator=generator, **cuda))),
    "permuted by generators": drawn(lambda: generated(lambda generator: torch.randperm(5, generator=generator, **cuda))),
    "after large": drawn(after_large),
    "strided": drawn(strided),
    "inferred": drawn(inferred),
    "of numbers": drawn(lambda: [torch.rand(3, **cuda), torch.normal(1.0, 2.0, (3,), **cuda), torch.rand(2, **cuda)]),
    "gradients": drawn(lambda: [gradient(), in_backward()]),
    "restored": restored(),
    "branches": bool(torch.rand(1, **cuda) < 2) and torch.randn(3, **cuda).abs().max().item() > 0,
    "empty": [*torch.rand(0, **cuda).shape],
}
print(json.dumps(found))
