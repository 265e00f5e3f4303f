# two processes with a GPU each: DDP, FSDP2 and collectives on small data
import json, os, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def layers(n):
    return torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(n)]).cuda()


def train(model):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(64, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main(rank, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    train(DistributedDataParallel(layers(4), device_ids=[rank]))
    sharded = layers(4)
    for layer in sharded:
        fully_shard(layer)
    train(fully_shard(sharded))
    sizes = [torch.zeros(1, dtype=torch.long, device="cuda") for _ in range(2)]
    dist.all_gather(sizes, torch.tensor([7], device="cuda"))
    # Each rank sends to both, so a list of tensors is exchanged in one group of sends and receives.
    exchanged = [torch.zeros(1, dtype=torch.long, device="cuda") for _ in range(2)]
    dist.all_to_all(exchanged, [torch.tensor([3], device="cuda"), torch.tensor([3], device="cuda")])
    alone = dist.split_group(split_ranks=[[0], [1]])
    own = torch.zeros(1, dtype=torch.long, device="cuda")
    dist.all_gather_into_tensor(own, torch.tensor([5], device="cuda"), group=alone)
    dist.barrier()
    if rank == 0:
        s = torch.cuda.memory_stats()
        print(json.dumps({"gathered": [int(size) for size in sizes], "exchanged": [int(part) for part in exchanged], "alone": own.tolist(), "num_ooms": s["num_ooms"], "devices": torch.cuda.device_count()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(main, (folder,), nprocs=2, start_method="fork")
