# Allocations whose peak of reserved memory depends on the order of addresses.
import json, random, torch

generator, live = random.Random(2), []
for _ in range(1500):
    if live and generator.random() < 0.5:
        live.pop(generator.randrange(len(live)))
    else:
        live.append(torch.empty(int(2 ** generator.uniform(20, 26)), dtype=torch.uint8, device="cuda"))
    if generator.random() < 0.01:
        torch.cuda.empty_cache()
print(json.dumps({"peak": torch.cuda.max_memory_reserved()}))
