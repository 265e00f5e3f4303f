# Two ranks, of which one does not call what the other waits for. The parent waits for both and ends neither.
import sys, tempfile
import torch
import torch.distributed as dist

MODE = sys.argv[1]


def main(rank, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    pairs = [dist.new_group([0, 1]) for _ in range(2)]
    data = torch.zeros(1024, device="cuda")
    for group in [None, *pairs]:
        dist.all_reduce(data, group=group)
    torch.cuda.synchronize()
    if MODE == "oom" and rank == 1:
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    if MODE == "caught" and rank == 1:
        try:
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            dist.broadcast(data, 0)
    if MODE == "fewer" and rank == 1:
        return
    if MODE == "cycle":
        dist.all_reduce(data, group=pairs[rank])
        torch.cuda.synchronize()
    if MODE == "sizes":
        data = torch.zeros(1024 + rank, device="cuda")
    if MODE == "receive":
        dist.recv(data, 1 - rank)
        torch.cuda.synchronize()
    dist.all_reduce(data)
    torch.cuda.synchronize()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        ranks = [torch.multiprocessing.get_context("spawn").Process(target=main, args=(rank, folder)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
