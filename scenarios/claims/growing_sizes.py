# Allocates larger tensors in each step, as for longer sequences. No cached block is large enough for the next one.
import torch

for step in range(40):
    x = torch.empty((200 + 10 * step) << 20, dtype=torch.uint8, device="cuda")
    y = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    del x
    del y
