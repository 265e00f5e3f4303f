# torchrun restarts both ranks after one runs out of memory in the first attempt.
import json, os, sys
import torch
import torch.distributed as dist

if "RANK" not in os.environ:
    from torch.distributed.run import main

    main(["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", __file__])
    sys.exit()
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
data = torch.tensor([rank + 1.0], device="cuda")
for step in range(3):
    if step == 1 and rank == 1 and attempt == 0:
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    dist.all_reduce(data)
    torch.cuda.synchronize()
total = data.item()
dist.destroy_process_group()
if rank == 0:
    print(json.dumps({"attempt": attempt, "total": total}), flush=True)
