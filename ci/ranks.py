"""Starts ranks by `fork`: harness exec --devices N -- python ci/ranks.py train|reduce|oom N

train: five iterations of FSDP2 with four transformer layers of width 256. reduce: the time of an all-reduce. oom: a rank in the middle runs out of
memory in the third of four steps, and the others wait for it.
"""
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.fsdp import fully_shard


def train(rank, ranks):
    begin = time.process_time()
    model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(256, 4, batch_first=True) for _ in range(4)]).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 16, 256, device="cuda")).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    if rank == 0:
        with open("/proc/self/status") as status:
            resident = next(line.split()[1] for line in status if line.startswith("VmRSS"))
        print(f"{ranks} ranks: {time.process_time() - begin:.2f} s of processor time and {int(resident) // 1024} MiB in rank 0", flush=True)


def reduce(rank, ranks):
    for numbers, times in ((4, 200), (1 << 18, 30), (1 << 20, 30)):
        tensor = torch.ones(numbers, device="cuda")
        for _ in range(5):
            dist.all_reduce(tensor)
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(tensor)
            torch.cuda.synchronize()
        if rank == 0:
            print(f"{ranks} ranks: {4 * numbers} bytes in {(time.perf_counter() - begin) / times * 1e3:.2f} ms", flush=True)


def oom(rank, ranks):
    tensor = torch.ones(1 << 20, device="cuda")
    for step in range(4):
        if rank == ranks // 2 and step == 2:
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        dist.all_reduce(tensor)
        torch.cuda.synchronize()


def main(rank, ranks, work, store):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=ranks)
    work(rank, ranks)
    dist.barrier()
    # Destroying the group of many ranks takes longer than the work.
    os._exit(0)


if __name__ == "__main__":
    work, ranks = dict(train=train, reduce=reduce, oom=oom)[sys.argv[1]], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        begin = time.time()
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=main, args=(rank, ranks, work, f"file://{folder}/store")) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        print(f"{ranks} ranks: {time.time() - begin:.1f} s")
    sys.exit(max(abs(process.exitcode) for process in processes))
