# Deletes every second of 32 tensors of 20 MiB. Each has its own segment, so the others pin nothing.
import torch

held = [torch.empty(20 << 20, dtype=torch.uint8, device="cuda") for _ in range(32)]
del held[::2]
torch.cuda.empty_cache()
