# A training loop that recovers from running out of memory. It leaves the `except` block first, so nothing keeps the failed step's
# tensors, and then repeats the step with half the rows. The first argument is the initial number of rows.
import sys

import torch

model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024))


def on_gpu():
    while True:
        try:
            return model.cuda()
        except torch.OutOfMemoryError:
            pass
        torch.cuda.empty_cache()


def step(rows):
    loss = model(torch.ones(rows, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


on_gpu()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
done, rows = 0, int(sys.argv[1]) if sys.argv[1:] else 4096
while done < 4:
    failed = False
    try:
        step(rows)
    except torch.OutOfMemoryError:
        failed = True
    optimizer.zero_grad()
    if failed:
        rows //= 2
        torch.cuda.empty_cache()
    else:
        done += 1
print("rows", rows)
