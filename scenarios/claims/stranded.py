# Keeps one tensor of 270 MiB in a segment of 530 MiB. The rest of the segment cannot be released.
import torch

x = torch.empty(530 << 20, dtype=torch.uint8, device="cuda")
del x
y = torch.empty(270 << 20, dtype=torch.uint8, device="cuda")
torch.cuda.empty_cache()
