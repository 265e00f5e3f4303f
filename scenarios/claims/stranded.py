# A segment of 530 MiB keeps one tensor of 270 MiB: what is left of it serves nothing larger, and does not go back.
import torch

x = torch.empty(530 << 20, dtype=torch.uint8, device="cuda")
del x
y = torch.empty(270 << 20, dtype=torch.uint8, device="cuda")
torch.cuda.empty_cache()
