# Creates a tensor with one number.
import torch

x = torch.zeros(1, device="cuda")
