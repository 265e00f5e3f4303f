"""Tries its first product again if the library fails, but not its first decomposition."""
import torch

x = torch.ones(64, 64, device="cuda")
try:
    y = x @ x
except RuntimeError:
    y = x @ x
torch.linalg.inv_ex(x)
