# Trains a model with large layers for three steps. SET_TO_NONE=0 keeps the gradients and sets them to zero.
import os

import torch

model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.empty(int(os.environ.get("BATCH", "8192")), 2048, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=os.environ.get("SET_TO_NONE", "1") == "1")
