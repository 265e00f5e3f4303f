# Allocates from the small and the large pool on two streams, frees all segments, and allocates again.
import json, torch


def allocate(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


kept = [allocate(1 << 20), allocate(300 << 20)]
with torch.cuda.stream(torch.cuda.Stream()):
    kept.append(allocate(20 << 20))
allocated = torch.cuda.memory_allocated() >> 20
kept.clear()
torch.cuda.synchronize()
torch.cuda.empty_cache()
kept.append(allocate(900 << 20))
print(json.dumps({"allocated": allocated, "fits_again": torch.cuda.memory_allocated() >> 20 == 900}))
