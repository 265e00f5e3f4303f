# Tensors that become longer from step to step, as sequences do: each needs a block that was not there before.
import torch

for step in range(40):
    x = torch.empty((200 + 10 * step) << 20, dtype=torch.uint8, device="cuda")
    y = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    del x
    del y
