"""Runs out of memory of the GPU while it holds pinned host memory, and writes a snapshot of PyTorch to `plain.pickle`."""
import torch

pinned = torch.empty(24 << 20, pin_memory=True)
freed = torch.empty(8 << 20, pin_memory=True)
del freed
torch.ones(1, device="cuda")
torch.cuda.memory._dump_snapshot("plain.pickle")
torch.empty(3 << 30, device="cuda")
