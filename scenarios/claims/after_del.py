# Makes 400 MB of numbers and forgets them.
import torch

x = torch.empty(100_000_000, device="cuda")
del x
