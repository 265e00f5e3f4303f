# Creates a matrix of 10,000 x 10,000 32-bit numbers.
import torch

x = torch.empty(10_000, 10_000, device="cuda")
