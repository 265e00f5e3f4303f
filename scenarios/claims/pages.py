# Creates a tensor of SIZE bytes.
import os

import torch

x = torch.empty(int(os.environ["SIZE"]), dtype=torch.uint8, device="cuda")
