# Creates a tensor of 400 MB and deletes it.
import torch

x = torch.empty(100_000_000, device="cuda")
del x
