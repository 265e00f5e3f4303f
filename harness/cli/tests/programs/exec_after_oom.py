# After an out of memory error, the program replaces itself. The new program has the memory of the old one.
import json, os, sys, torch


def allocate(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")


blocks = [allocate(300), allocate(300)]
if len(sys.argv) == 1:
    try:
        blocks.append(allocate(600))
    except torch.OutOfMemoryError:
        os.execv(sys.executable, [sys.executable, __file__, "again"])
print(json.dumps({"blocks": len(blocks), "free": torch.cuda.mem_get_info()[0] >> 20, "num_ooms": torch.cuda.memory_stats()["num_ooms"]}))
