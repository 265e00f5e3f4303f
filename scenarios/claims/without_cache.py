# Creates and deletes the same three tensors a hundred times, as in a training step.
import torch

for _ in range(100):
    a = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    b = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    c = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    del a, b, c
