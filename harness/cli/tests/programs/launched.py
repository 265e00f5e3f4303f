"""A program of one rank, for launchers."""
import torch

model = torch.nn.Linear(64, 64).cuda()
model(torch.ones(8, 64, device="cuda")).sum().backward()
