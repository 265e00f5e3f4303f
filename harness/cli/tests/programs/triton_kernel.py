"""Loads the module of a kernel of Triton."""
import torch
import triton
from triton import language


@triton.jit
def double(values, size: language.constexpr):
    at = language.arange(0, size)
    language.store(values + at, 2 * language.load(values + at))


values = torch.ones(1024, device="cuda")
double[(1,)](values, size=1024)
