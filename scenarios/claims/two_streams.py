# One stream frees 256 MiB, and another requests 256 MiB.
import torch

first, second = torch.cuda.Stream(), torch.cuda.Stream()
with torch.cuda.stream(first):
    x = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    del x
with torch.cuda.stream(second):
    y = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
