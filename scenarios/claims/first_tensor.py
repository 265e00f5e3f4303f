# Makes one tensor of one number.
import torch

x = torch.zeros(1, device="cuda")
