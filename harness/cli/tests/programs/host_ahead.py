# Programs whose peak depends on the timing of the GPU, one per name: other streams use memory that is freed. `harness exec` shows the peak of a host that
# runs ahead from a replay of the run.
import contextlib, os, signal, sys, threading, torch

MIB = 1 << 20
main, side, third = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()


def block(size, device="cuda"):
    return torch.empty(size * MIB, dtype=torch.uint8, device=device)


def used_by(tensor, *streams):
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            tensor.add_(1)
        tensor.record_stream(stream)
    return tensor


def gathers(layers=8, steps=3):
    """Shards are gathered on a side stream before they are used, as FSDP prefetches them. The host reads the loss."""
    shards = [block(4) for _ in range(layers)]
    loss = torch.zeros(1, device="cuda")
    for _ in range(steps):
        for layer in [*range(layers), *reversed(range(layers))]:
            with torch.cuda.stream(side):
                full = torch.cat([shards[layer]] * 8)
            main.wait_stream(side)
            full.add_(1)
            full.record_stream(main)
            del full
        loss.item()


def loader(steps=12):
    """Batches are copied from pinned memory on a side stream."""
    host = torch.empty(48 * MIB, dtype=torch.uint8, pin_memory=True)
    for step in range(steps):
        with torch.cuda.stream(side):
            batch = host.to("cuda", non_blocking=True)
        main.wait_stream(side)
        batch.record_stream(main)
        activations = [torch.empty_like(batch) for _ in range(3)]
        batch.add_(1)
        del batch, activations
        if step % 4 == 3:
            torch.cuda.synchronize()


def pinned(steps=10):
    """Copies to the host, for which an event is waited later."""
    hosts, events = [], []
    for step in range(steps):
        source = block(32)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            host = torch.empty(32 * MIB, dtype=torch.uint8, pin_memory=True)
            host.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        source.record_stream(side)
        events.append(event)
        hosts.append(host)
        del source
        if step >= 3:
            events[step - 3].synchronize()


def window():
    """The host stays three steps behind, with blocks of different sizes."""
    events = []
    for step in range(20):
        used_by(block(10 + 7 * (step % 5)), side)
        event = torch.cuda.Event()
        event.record(side)
        events.append(event)
        if step >= 3:
            events[step - 3].synchronize()


def polling():
    """The host asks until the GPU has finished."""
    for step in range(12):
        used_by(block(64), side)
        event = torch.cuda.Event()
        event.record(side)
        if step % 3 == 2:
            while not event.query():
                pass


def asking():
    """The host frees what the GPU no longer uses."""
    pending = []
    for step in range(12):
        tensor = used_by(block(64), side)
        event = torch.cuda.Event()
        event.record(side)
        pending.append((event, tensor))
        del tensor
        pending = [(event, tensor) for event, tensor in pending if not event.query()]


def devices():
    """Two devices, whose streams the host waits for at other times."""
    for device in range(2):
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            for step in range(8):
                tensor = block(40 + 10 * device)
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    tensor.add_(1)
                tensor.record_stream(stream)
                del tensor
                if step % (2 + 2 * device) == 0:
                    stream.synchronize()


def streams():
    """Blocks wait for two streams, of which the host waits for one or both."""
    for step in range(18):
        used_by(block(24), *[(side,), (third,), (side, third)][step % 3])
        if step % 4 == 3:
            side.synchronize()
        if step % 9 == 8:
            third.synchronize()


def growing():
    """Free blocks are split and merged."""
    kept = []
    for step in range(24):
        used_by(block(6 + step), side)
        kept.append(block(1 + step % 4))
        if step % 5 == 4:
            del kept[::2]
        if step % 8 == 7:
            torch.cuda.synchronize()


def emptied():
    """The cache is emptied, so the allocator waits for its blocks."""
    for step in range(12):
        used_by(block(30 + step), side)
        if step % 5 == 4:
            torch.cuda.empty_cache()


def recovered():
    """An allocation fails, and the program goes on."""
    kept = [block(128)]
    for step in range(10):
        used_by(block(32), side)
        if step == 5:
            with contextlib.suppress(torch.OutOfMemoryError):
                kept.append(block(1 << 17))


def limited():
    """The program limits its own memory, so requests wait for freed blocks."""
    torch.cuda.set_per_process_memory_fraction(0.0025)
    for step in range(10):
        used_by(block(64), side)


def relimited():
    """The program changes its limit."""
    limited()
    torch.cuda.set_per_process_memory_fraction(1.0)


def ended():
    """The program ends with an OutOfMemoryError."""
    kept = []
    for step in range(100):
        used_by(block(16), side)
        kept.append(block(64))


def thread():
    """All work is in another thread."""
    worker = threading.Thread(target=gathers)
    worker.start()
    worker.join()


def backward():
    """Autograd's own thread frees memory that a side stream used."""
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)]).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(4):
        data = torch.empty(4096, 1024, device="cuda")
        side.wait_stream(main)
        with torch.cuda.stream(side):
            hidden = model[:3](data)
        data.record_stream(side)
        hidden.record_stream(main)
        main.wait_stream(side)
        model[3:](hidden).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        del data, hidden


def resets():
    """The program resets the counters of its allocator."""
    gathers(steps=1)
    torch.cuda.reset_accumulated_memory_stats()
    gathers(steps=1)


def graph():
    """A CUDA graph is captured first."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        block(2).add_(1)
    gathers()


def history():
    """The program reads its own history, in which no other one is."""
    gathers(steps=1)
    assert not any(torch.cuda.memory._snapshot()["device_traces"])
    torch.cuda.memory._record_memory_history(context=None)
    gathers(steps=1)
    assert any(torch.cuda.memory._snapshot()["device_traces"])


def killed():
    """The program ends without Python's exit handlers."""
    gathers()
    os.kill(os.getpid(), signal.SIGKILL)


globals()[sys.argv[1]]()
