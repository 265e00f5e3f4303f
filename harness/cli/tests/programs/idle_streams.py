# Blocks that a side stream uses are freed when the host knows that the stream has no work (`idle`), or when it may still work (`busy`, once per kind of work). With
# `thread`, another thread asks whether the stream has finished.
import sys, threading, torch

main, side, third = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
half = torch.ones(64, 64, device="cuda", dtype=torch.half)
single, images = half.float(), torch.ones(8, 8, 8, 8, device="cuda")


def on(stream, work):
    with torch.cuda.stream(stream):
        work()


def work():
    single.add_(1)


def ended(stream):
    """An event of a stream."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


def transitive():
    """The host waits for the main stream, which has waited for the side stream."""
    on(side, work)
    done = ended(side)
    main.wait_event(done)
    ended(main).synchronize()
    assert done.query() and side.query() and main.query()


def in_capture(act):
    """A call that CUDA forbids."""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            work()
            act()
    except RuntimeError:
        return
    raise AssertionError("the capture allowed it")


IDLE = [
    lambda: None,
    work,
    lambda: (on(side, work), side.synchronize(), work()),
    lambda: (on(side, work), torch.cuda.synchronize(), work()),
    transitive,
    lambda: (third.wait_stream(side), third.query(), ended(third).query()),
    lambda: in_capture(lambda: torch.cuda.current_stream().query()),
    lambda: in_capture(lambda: ended(torch.cuda.current_stream()).query()),
]
BUSY = [
    work,
    lambda: half @ half,
    lambda: single @ single,
    lambda: torch.nn.functional.linear(half, half, half[0]),
    lambda: torch.nn.functional.conv2d(images, images),
    lambda: torch.fft.fft(images),
    lambda: torch.linalg.qr(single),
    lambda: single.copy_(single.clone()),
    lambda: (on(third, work), side.wait_stream(third)),
]


def free(is_busy, act):
    torch.cuda.synchronize()
    block = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    on(side, act) if is_busy else act()
    block.record_stream(side)
    del block
    torch.empty(8 << 20, dtype=torch.uint8, device="cuda")


def in_thread():
    on(side, work)
    thread = threading.Thread(target=lambda: side.query())
    thread.start()
    thread.join()


if sys.argv[1] == "thread":
    in_thread()
else:
    for act in {"idle": IDLE, "busy": BUSY}[sys.argv[1]]:
        free(sys.argv[1] == "busy", act)
