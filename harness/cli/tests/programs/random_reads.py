# Reads the results of each generator of random numbers, one per line, in memory whose earlier values are known. A line that ends with `# read` reads
# numbers that nothing computes; `small_random.py` checks the others.
import torch
import torch.nn.functional as F
from torch import distributions

cuda = dict(device="cuda")
half, ones = torch.full((8,), 0.5, **cuda), torch.ones(8, **cuda)


def stale():
    earlier = [torch.full((8,), 7, dtype=of, **cuda) for of in (torch.float32, torch.int64, torch.float32, torch.int64)]
    del earlier
    return torch.empty(8, **cuda)


stale(); torch.rand(8, **cuda).tolist()
stale(); torch.randn(8, **cuda).tolist()
stale(); torch.randint(9, (8,), **cuda).tolist()
stale(); torch.randint(3, 9, (8,), **cuda).tolist()
stale(); torch.randperm(8, **cuda).tolist()
stale(); torch.rand_like(ones).tolist()
stale(); torch.randn_like(ones).tolist()
stale(); torch.randint_like(ones, 9).tolist()
stale(); torch.bernoulli(half).tolist()
stale(); torch.multinomial(half, 2).tolist()
stale(); torch.multinomial(half, 20, replacement=True).tolist()  # read
stale(); torch.normal(0.0, 1.0, (8,), **cuda).tolist()
stale(); torch.normal(half, ones).tolist()
stale(); torch.poisson(ones).tolist()  # read
stale(); torch.binomial(ones, half).tolist()  # read
stale().bernoulli_(0.5).tolist()
stale().bernoulli_(half).tolist()
stale().normal_().tolist()
stale().uniform_().tolist()
stale().random_().tolist()
stale().random_(9).tolist()
stale().exponential_().tolist()
stale().cauchy_().tolist()
stale().log_normal_().tolist()
stale().geometric_(0.5).tolist()
stale(); F.dropout(ones, 0.5).tolist()
stale(); F.alpha_dropout(ones, 0.5, training=True).tolist()
stale(); F.dropout1d(torch.ones(2, 4, **cuda), 0.5).tolist()
stale(); F.rrelu(-ones, training=True).tolist()  # read
stale(); torch.nn.init.xavier_uniform_(torch.empty(2, 4, **cuda)).tolist()
stale(); torch.nn.Linear(2, 4, **cuda).weight.tolist()
stale(); distributions.Gamma(ones, ones, validate_args=False).sample().tolist()  # read
stale(); F.gumbel_softmax(ones, hard=True).tolist()
stale(); torch.rand(8, generator=torch.Generator("cuda").manual_seed(1), **cuda).tolist()
