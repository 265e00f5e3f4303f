# In 1 GiB: 30 MiB pin a segment of 300 MiB, so 750 MiB do not fit although they are free. With expandable segments they fit.
import torch


def block(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")


first = block(300)
del first
kept = block(30)
last = block(750)
