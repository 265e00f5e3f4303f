# Two ranks train. In its second step, rank 1 runs out of memory, unless `torchrun` has restarted the ranks. PARALLEL is `ddp` or `fsdp`. With SKIP=1, a rank
# that runs out of memory skips its batch.
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
model = fully_shard(layers) if os.environ["PARALLEL"] == "fsdp" else DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    is_large = rank == 1 and step == 1 and restarts == 0
    try:
        loss = model(torch.randn(1 << 20 if is_large else 64, 1024, device="cuda")).square().mean()
    except torch.OutOfMemoryError:
        if os.environ.get("SKIP") != "1":
            raise
        continue
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
dist.destroy_process_group()
