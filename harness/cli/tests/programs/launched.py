"""A program of one rank, for launchers."""
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(8, 64, device="cuda")).sum().backward()
optimizer.step()
