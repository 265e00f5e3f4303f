# A training loop whose recovery is broken in two ways: it keeps the error, whose traceback keeps the failed step's tensors; and where the first step
# fails, there is no loss to go on with. What fails outside of the loop ends it.
import torch

model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
errors, rows = [], 4096


def step(rows):
    output = model(torch.ones(rows, 1024, device="cuda"))
    loss = output.square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


for _ in range(4):
    try:
        loss = step(rows)
    except torch.OutOfMemoryError as error:
        errors.append(error)
        rows //= 2
    optimizer.zero_grad()
    print("loss", loss)
