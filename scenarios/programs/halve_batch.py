# Trains a small network and halves the batch after an OOM. Starts with BATCH samples, 512 by default.
import gc
import os

import torch


def train(batch):
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(4)]).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.empty(batch * 64, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


batch = int(os.environ.get("BATCH", "512"))
while True:
    try:
        train(batch)
        break
    except torch.OutOfMemoryError:
        if batch == 1:
            raise
    # After the `except`: inside it the exception keeps the tensors of the failed step alive.
    batch //= 2
    gc.collect()
    torch.cuda.empty_cache()
