# Trains a small network, and halves the batch when memory is out: that of BATCH first, 512 if not given.
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
    # Behind the `except`: inside it the exception still holds what the failed step had.
    batch //= 2
    gc.collect()
    torch.cuda.empty_cache()
