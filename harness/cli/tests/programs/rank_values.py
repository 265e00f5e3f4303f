# Two ranks with different small values, which each collective exchanges or reduces. Unknown values read as zeros.
import json, torch
import torch.distributed as dist


def main(rank, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, device_id=torch.device("cuda", rank))

    def own(*values):
        return torch.tensor(values, device="cuda")

    def empty(count=1):
        return torch.zeros(count, dtype=torch.long, device="cuda")

    def reduced(operation):
        value = own(rank + 1)
        dist.all_reduce(value, operation)
        return value.item()

    def filled(into, collective, *arguments):
        collective(into, *arguments)
        return into.tolist()

    got = {"reduced": [reduced(dist.ReduceOp.MAX), reduced(dist.ReduceOp.SUM)]}
    objects = [None, None]
    dist.all_gather_object(objects, "x" * (1 + 9 * rank))
    got["objects"] = objects
    got["gathered"] = filled(empty(2), dist.all_gather_into_tensor, own(rank + 5))
    got["scattered"] = filled(empty(), dist.reduce_scatter_tensor, own(1 + rank, 20 + rank))
    got["exchanged"] = filled(empty(2), dist.all_to_all_single, own(10 * rank, 10 * rank + 1))
    if rank == 0:
        dist.send(own(7), 1)
    got["received"] = filled(empty(), dist.recv, 0) if rank == 1 else None
    partly = own(5) if rank == 0 else torch.randn(1 << 20, device="cuda").sum().long().reshape(1)
    dist.all_reduce(partly)
    got["unknown"] = [partly.item()]
    if rank == 0:
        both = [torch.tensor([3], device=device) for device in range(2)]
        torch.cuda.nccl.all_reduce(both)
        got["unknown"] += [both[0].item(), both[1].item()]
    answers = [None, None]
    dist.all_gather_object(answers, got)
    if rank == 0:
        print(json.dumps({"ranks": answers}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(main, (folder,), nprocs=2, start_method="fork")
