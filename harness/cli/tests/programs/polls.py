# Each block is freed when the GPU has finished with it, which the program asks.
import torch

pending = []
for step in range(12):
    block = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    block.add_(1)
    event = torch.cuda.Event()
    event.record()
    pending.append((event, block))
    del block
    pending = [(event, block) for event, block in pending if not event.query()]
