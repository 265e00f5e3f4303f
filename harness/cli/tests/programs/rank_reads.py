# Two ranks. Each line that ends with `# read` reads a value that one of them does not know: bytes that its sender does not know, and data that arrives
# after the program has used its buffer again. A GPU would read other values there than the data that arrives.
import os, time
import torch
import torch.distributed as dist


def main(rank, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, device_id=torch.device("cuda", rank))

    def partly(known):
        values = torch.empty(8, dtype=torch.uint8, device="cuda")
        values[:known] = 1
        return values

    def late(into, use):
        """Receives after `use`."""
        used = os.path.join(folder, use.__name__)
        if rank == 1:
            while not os.path.exists(used):
                time.sleep(0.01)
            return dist.send(torch.tensor([7], device="cuda"), 0)
        dist.irecv(into, 1)
        use(into)
        open(used, "w").close()

    gathered, received = torch.zeros(16, dtype=torch.uint8, device="cuda"), torch.zeros(8, dtype=torch.uint8, device="cuda")
    dist.all_gather_into_tensor(gathered, partly(4 + rank))
    if rank == 0:
        dist.send(partly(3), 1)
        assert gathered[:4].tolist() + gathered[8:13].tolist() == [1] * 9
        gathered[3:5].tolist()  # read
        gathered[13:].tolist()  # read
    else:
        dist.recv(received, 0)
        assert received[:3].tolist() == [1] * 3
        received[3].item()  # read

    # Objects of unequal size have padding, which only torch copies.
    words = ["a", "b" * 100]
    objects, gathered, mine = [None] * 2, [None] * 2 if rank == 0 else None, [None]
    dist.all_gather_object(objects, words[rank])
    dist.gather_object(words[rank], gathered)
    dist.scatter_object_list(mine, words if rank == 0 else None)
    assert objects == words and gathered in (words, None) and mine == [words[rank]]

    def leave(into):
        pass

    def add(into):
        into += 1

    def draw(into):
        into.copy_(torch.poisson(torch.ones(1, device="cuda")))

    def launch(into):
        into.fill_(torch.rand(1000, device="cuda").sum().long())

    values = {use: torch.ones(1, dtype=torch.long, device="cuda") for use in (leave, add, draw, launch)}
    for use, into in values.items():
        late(into, use)
    if rank == 0:
        assert values[leave].item() == 7
        values[add].item()  # read
        values[draw].item()  # read
        values[launch].item()  # read
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(main, (folder,), nprocs=2)
