# Runs sixteen layers with one checkpoint every INTERVAL layers, or none if INTERVAL is 0.
import os

import torch
from torch.utils.checkpoint import checkpoint

interval = int(os.environ.get("INTERVAL", "0"))
layers = [torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU()).cuda() for _ in range(16)]


def run(group, x):
    for layer in group:
        x = layer(x)
    return x


x = torch.empty(8192, 1024, device="cuda", requires_grad=True)
if interval == 0:
    x = run(layers, x)
else:
    for start in range(0, 16, interval):
        x = checkpoint(run, layers[start : start + interval], x, use_reentrant=False)
x.sum().backward()
