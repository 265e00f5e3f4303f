# In 1 GiB: 30 MiB stay in a segment of 300 MiB, which cannot go back to the driver, so 750 MiB do not fit though they are free. With expandable segments they do.
import torch


def block(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")


first = block(300)
del first
kept = block(30)
last = block(750)
