# A training loop with two mistakes in its recovery. It keeps the error, whose traceback keeps the tensors of the failed step. If the first step fails,
# it has no loss to continue with. An error outside of the loop ends the program.
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
