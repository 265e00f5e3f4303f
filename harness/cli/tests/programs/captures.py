"""Calls that CUDA forbids while a stream captures: the errors inside of the capture and at its end, and what captures may do."""
import gc, json, threading, torch

CODES = {
    "operation not permitted when stream is capturing": 900,
    "operation failed due to a previous error during capture": 901,
    "operation would result in a merge of separate capture sequences": 902,
    "capturing stream has unjoined work": 904,
    "dependency created on uncaptured work in another stream": 905,
    "operation not permitted on an event last recorded in a capturing stream": 907,
    "attempt to terminate a thread-local capture sequence from another thread": 908,
}
x = torch.ones(64, 64, device="cuda")
(x @ x).sum().item()
side = torch.cuda.Stream()
before = torch.cuda.Event()
before.record(side)


def code(act):
    try:
        act()
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        return next((code for message, code in CODES.items() if message in text), text)
    return 0


def captured(act, mode="global"):
    """The codes of an action in a capture, and of the capture's end."""
    graph, inside = torch.cuda.CUDAGraph(), []

    def capture():
        with torch.cuda.graph(graph, capture_error_mode=mode):
            torch.zeros(8, device="cuda")
            inside.append(code(act))

    end = code(capture)
    end or graph.replay()
    return [*inside, end]


def recorded():
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def fork(joins):
    main, event = torch.cuda.current_stream(), recorded()
    side.wait_event(event)
    with torch.cuda.stream(side):
        torch.ones(8, device="cuda")
    joins and main.wait_stream(side)


def in_thread(act):
    errors = []
    thread = threading.Thread(target=lambda: errors.append(code(act)))
    thread.start()
    thread.join()
    if errors != [0]:
        raise RuntimeError(next(message for message, code in CODES.items() if code == errors[0]))


def merge():
    other, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    event = recorded()
    with torch.cuda.stream(stream):
        other.capture_begin()
        try:
            stream.wait_event(event)
        finally:
            code(other.capture_end)


elapsed = torch.cuda.Event(enable_timing=True)
elapsed.record()
results = {
    "item": captured(lambda: (x + 1).sum().item()),
    "nonzero": captured(lambda: x.nonzero()),
    "device": captured(torch.cuda.synchronize),
    "stream": captured(lambda: torch.cuda.current_stream().synchronize()),
    "query": captured(lambda: torch.cuda.current_stream().query()),
    "event": captured(lambda: recorded().synchronize()),
    "event query": captured(lambda: recorded().query()),
    "elapsed": captured(lambda: elapsed.elapsed_time(recorded())),
    "other event": captured(lambda: before.query()),
    "other event, relaxed": captured(lambda: before.query(), "relaxed"),
    "event in thread, global": captured(lambda: in_thread(before.query)),
    "event in thread, local": captured(lambda: in_thread(before.query), "thread_local"),
    "isolation": captured(lambda: torch.cuda.current_stream().wait_event(before)),
    "merge": captured(merge),
    "unjoined": captured(lambda: fork(False)),
    "joined": captured(lambda: fork(True)),
    **{mode: captured(lambda: torch.empty(64 << 20, device="cuda") + 1, mode) for mode in ("global", "thread_local", "relaxed")},
}


def allocate():
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(30 << 20))


results |= {f"thread, {mode}": captured(lambda: in_thread(allocate), mode) for mode in ("thread_local", "relaxed", "global")}
net = torch.nn.Linear(64, 64).cuda()
graphed = torch.cuda.make_graphed_callables(net, (x.clone().requires_grad_(),))
graphed(x.clone().requires_grad_()).sum().backward()
compiled = torch.compile(torch.nn.Sequential(net, torch.nn.ReLU()), backend="cudagraphs")
for _ in range(3):
    compiled(x).sum().item()
torch.cuda.synchronize()


def kept():
    """MiB that torch keeps reserved after a capture that fails with 64 MiB in its pool."""
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    captured(lambda: torch.empty(64 << 20, device="cuda", dtype=torch.uint8).sum().item())
    gc.collect()
    torch.cuda.empty_cache()
    return (torch.cuda.memory_reserved() - reserved) >> 20


print(json.dumps({**results, "kept": [kept(), kept()]}))
