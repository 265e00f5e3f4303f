# Processes with a GPU each exchange real data: objects, tensors, gradients. With `--values cpu`, both kinds of data parallelism train like one process.
import copy, json, os, tempfile
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
COMPUTED = '"values":"cpu"' in os.environ.get("HARNESS_GPU", "")


def losses(model, data, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(data[batch]).square().mean()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total, op=dist.ReduceOp.AVG)
        found.append(round(total.item(), 4))
    return found


def exchange(rank):
    other = 1 - rank
    objects, seed, received = [None] * RANKS, torch.tensor([41 + rank], device="cuda"), torch.zeros(2, device="cuda")
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * (1 + 10 * rank)})
    dist.broadcast(seed, 1)
    dist.broadcast(torch.empty(0, device="cuda"), 1)  # Its address is null.
    sent = dist.P2POp(dist.isend, torch.tensor([1.0, rank], device="cuda"), other)
    for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, received, other)]):
        work.wait()
    parts = [torch.zeros(1, dtype=torch.long, device="cuda") for _ in range(RANKS)]
    dist.all_to_all(parts, [torch.tensor([10 * rank + to], device="cuda") for to in range(RANKS)])
    summed = torch.tensor([rank + 1], device="cuda")
    dist.all_reduce(summed)
    alone = dist.new_group([rank], use_local_synchronization=True)
    dist.barrier(group=alone)
    return [len(found["text"]) for found in objects], seed.item(), received.tolist(), [part.item() for part in parts], summed.item()


def main(rank, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, device_id=torch.device("cuda", rank))
    found = {"exchanged": exchange(rank)}
    if COMPUTED:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
        data, own = torch.randn(8, 16), slice(4 * rank, 4 * rank + 4)
        synchronized = torch.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model)).cuda()
        parallel = DistributedDataParallel(copy.deepcopy(synchronized), device_ids=[rank])
        found["ddp"] = losses(parallel, data.cuda(), own)
        for layer in synchronized:
            fully_shard(layer)
        found["fsdp"] = losses(fully_shard(synchronized), data.cuda(), own)
    dist.barrier()
    dist.destroy_process_group()
    if COMPUTED:
        found["same"] = found["ddp"] == found["fsdp"] == losses(model, data, slice(0, 8))
    if rank == 0:
        print(json.dumps({name: found[name] for name in ("exchanged", "same") if name in found}), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(main, (folder,), nprocs=RANKS, start_method="fork")
