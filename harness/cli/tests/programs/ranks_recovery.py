# Two ranks that train together, each with its GPU as `cuda:0`. A rank that runs out of memory skips its batch, and so does not join the backward pass.
import os, tempfile
import torch, torch._dynamo  # Before the fork: the optimizer of each rank imports it.
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(rank, folder):
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, device_id=torch.device("cuda", 0))
    layers = [torch.nn.Linear(2048, 2048) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        try:
            loss = model(torch.randn(8192, 2048, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print("rank", rank, "loss", loss.item(), flush=True)
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(main, (folder,), nprocs=2, start_method="fork")
