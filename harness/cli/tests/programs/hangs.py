# Two ranks, of which one does not call what the other waits for. The parent waits for both and ends neither. Each argument is a mode.
import os, socket, subprocess, sys, tempfile, threading, time
import torch
import torch.distributed as dist

MODES = sys.argv[1:]


def main(rank, store):
    if MODE == "init" and rank == 1:
        os._exit(3)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=2)
    if MODE == "killed" and rank == 1:
        os.kill(os.getpid(), 9)
    pairs = [dist.new_group([0, 1]) for _ in range(2)]
    gloo = dist.new_group(backend="gloo") if MODE == "backward" else None
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
    if MODE in ("slow", "sleeps", "child") and rank == 0:
        threading.Thread(target=join_late, args=(pairs[1],)).start()
    if MODE in ("slow", "sleeps", "child") and rank == 1:
        dist.all_reduce(data, group=pairs[1])
        torch.cuda.synchronize()
    if MODE == "cycle":
        dist.all_reduce(data, group=pairs[rank])
        torch.cuda.synchronize()
    if MODE == "sizes":
        data = torch.zeros(1024 + rank, device="cuda")
    if MODE == "backward" and rank == 0:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), process_group=gloo)
        model(torch.ones(1, 8)).sum().backward()
    if MODE == "backward" and rank == 1:
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), process_group=gloo)
    if MODE in ("backward", "store") and rank == 1:
        dist.distributed_c10d._get_default_store().get("never")
    dist.all_reduce(data)
    torch.cuda.synchronize()


# Joins what rank 1 waits for after a recovery that takes longer than a hang.
def join_late(group):
    began = time.monotonic()
    if MODE == "sleeps":
        time.sleep(6)
    if MODE == "child":
        subprocess.run(["sleep", "6"], check=True)
    while time.monotonic() < began + 4:
        pass
    dist.all_reduce(torch.zeros(1024, device="cuda"), group=group)


# Rank 1 joins a collective of rank 0 only after rank 0 has waited for other work.
def ahead(rank, store):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=2)
    store = dist.distributed_c10d._get_default_store()
    large, ones = torch.empty(1 << 20, device="cuda"), torch.ones(4, device="cuda")
    dist.all_reduce(large)
    torch.cuda.synchronize()
    for name, data in ("unknown", large), ("known", ones.clone()):
        if rank == 1:
            store.get(name)
        work = dist.all_reduce(data, async_op=True)
        if rank == 0:
            torch.cuda.current_stream().synchronize()
            torch.cuda.current_stream().record_event().synchronize()
            assert ones.tolist() == [1] * 4
            store.set(name, "")
        work.wait()
        torch.cuda.synchronize()


# Rank 0 starts rank 1, which computes for a while before it joins.
def started(store):
    rank = int("STORE" in os.environ)
    store = os.environ.setdefault("STORE", store)
    if rank == 0:
        child = subprocess.Popen([sys.executable, *sys.argv])
    else:
        began = time.monotonic()
        while time.monotonic() < began + 5:
            pass
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=2)
    dist.all_reduce(torch.zeros(1024, device="cuda"))
    torch.cuda.synchronize()
    dist.destroy_process_group()
    sys.exit(child.wait() if rank == 0 else 0)


def run():
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("localhost", 0))
        store = f"tcp://localhost:{free.getsockname()[1]}" if MODE in ("init", "killed", "store") else f"file://{folder}/store"
        free.close()
        if MODE == "started":
            started(store)
        ranks = [torch.multiprocessing.get_context("fork").Process(target=ahead if MODE == "ahead" else main, args=(rank, store)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if MODE == "ahead" and any(rank.exitcode for rank in ranks):
            sys.exit(1)


if __name__ == "__main__":
    for MODE in MODES:
        run()
