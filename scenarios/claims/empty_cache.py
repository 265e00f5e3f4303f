# Every second of 32 tensors of 20 MiB is forgotten; what is left holds nothing back, since each has a segment of its own.
import torch

held = [torch.empty(20 << 20, dtype=torch.uint8, device="cuda") for _ in range(32)]
del held[::2]
torch.cuda.empty_cache()
