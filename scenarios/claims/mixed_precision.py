# Runs two steps of Adam on eight wide layers, in 32 bits or, with AMP=1, in mixed precision.
import os

import torch

model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
batch = int(os.environ.get("BATCH", "8192"))
for _ in range(2):
    with torch.autocast("cuda", dtype=torch.float16, enabled=os.environ.get("AMP") == "1"):
        loss = model(torch.empty(batch, 2048, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
