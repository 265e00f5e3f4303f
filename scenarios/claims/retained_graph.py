# Appends each loss with its graph to a list, for STEPS steps.
import os

import torch

model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU()) for _ in range(4)]).cuda()
losses = []
for _ in range(int(os.environ.get("STEPS", "8"))):
    losses.append(model(torch.empty(1024, 1024, device="cuda")).sum())
