# Two ranks train. In its second step, rank 1 runs out of memory, unless `torchrun` has restarted the ranks. PARALLEL is `ddp`, `fsdp`, or `zero1` to `zero3`
# for DeepSpeed, which continues from its last checkpoint after a restart. With SKIP=1, a rank that runs out of memory skips its batch.
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

parallel = os.environ["PARALLEL"]
rank, restarts = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
is_saved = parallel.startswith("zero") and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
checkpoints = os.path.join(tempfile.gettempdir(), "one_rank-" + os.environ.get("TORCHELASTIC_RUN_ID", "none"))
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
first = 0
if parallel.startswith("zero"):
    import deepspeed

    zero = {"stage": int(parallel[4:]), "reduce_bucket_size": 1 << 20, "stage3_prefetch_bucket_size": 1 << 20}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "zero_optimization": zero}
    model, *_ = deepspeed.initialize(model=layers, model_parameters=layers.parameters(), config=config)
    if is_saved and restarts:
        _, state = model.load_checkpoint(checkpoints)
        first = state["step"]
else:
    model = fully_shard(layers) if parallel == "fsdp" else DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(first, 3):
    is_large = rank == 1 and step == 1 and restarts == 0
    try:
        loss = model(torch.randn(1 << 20 if is_large else 64, 1024, device="cuda")).square().mean()
    except torch.OutOfMemoryError:
        if os.environ.get("SKIP") != "1":
            raise
        continue
    if parallel.startswith("zero"):
        model.backward(loss)
        model.step()
        if is_saved:
            model.save_checkpoint(checkpoints, client_state={"step": step + 1})
    else:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
if is_saved and rank == 0:
    shutil.rmtree(checkpoints)
dist.destroy_process_group()
