# Allocates tensors of 900 MiB, 860 MiB and so on, one at a time, each with a small tensor that stays.
import torch

kept = []
for step in range(16):
    x = torch.empty((900 - 40 * step) << 20, dtype=torch.uint8, device="cuda")
    kept.append(torch.empty(2 << 20, dtype=torch.uint8, device="cuda"))
    del x
