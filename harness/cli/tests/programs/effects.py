"""Fails because of a value that nothing computes, after an effect outside of the process that the argument names. With `_after_use`, the program uses the
GPU before the effect: then the library decides which of Python's audit events are effects.

With several arguments, a fork for each has that effect in the folder of its name. Prints as JSON what `harness exec` has noted of each."""
import json
import os
import socket
import subprocess
import sys
import tempfile

import torch


def temporary():
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("x")
    with tempfile.TemporaryDirectory() as folder:
        torch.save(torch.ones(3), os.path.join(folder, "model.pt"))
    tempfile.TemporaryFile().write(b"x")


def workers():
    data = torch.utils.data.TensorDataset(torch.arange(64.0))
    for batch in torch.utils.data.DataLoader(data, batch_size=8, num_workers=2):
        batch[0].cuda()


def child(program):
    subprocess.run([sys.executable, "-c", program], check=True)


def trace():
    with torch.profiler.profile() as profile:
        torch.ones(3)
    profile.export_chrome_trace("trace.json")


def observe():
    observer = torch.profiler.ExecutionTraceObserver().register_callback("execution.json")
    observer.start()
    observer.unregister_callback()


def noted():
    """The effects that the hooks of all processes have noted."""
    run = os.environ["HARNESS_GPU_RUN"]
    return {name: open(os.path.join(run, name)).read() for name in os.listdir(run) if name.startswith("effect-")}


def note_each(modes):
    found, known = {}, noted()
    for mode in modes:
        child = os.fork()
        if child == 0:
            os.chdir(mode)
            affect(mode)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, mode
        found[mode] = [text for name, text in noted().items() if name not in known]
        known = noted()
    print(json.dumps(found))


def affect(mode):
    effect, _, uses_before = mode.partition("_after_")
    if uses_before:
        torch.zeros(1).cuda()
    EFFECTS.get(effect, lambda: None)()


EFFECTS = {
    "temporary": temporary,
    "workers": workers,
    "python": lambda: child("pass"),
    "child": lambda: child("open('child.txt', 'w')"),
    "isolated": lambda: subprocess.run([sys.executable, "-I", "-c", "open('child.txt', 'w')"], check=True),
    "input": lambda: sys.stdin.read(),
    "writes": lambda: open("log.txt", "a"),
    "saves": lambda: torch.save(torch.ones(3), "model.pt"),
    "traces": trace,
    "observes": observe,
    "shares": lambda: torch.from_file("shared.bin", shared=True, size=8),
    "stores": lambda: torch.UntypedStorage.from_file("shared.bin", True, 8),
    "reads_file": lambda: torch.from_file(__file__, shared=False, size=8),
    "meets": lambda: torch.distributed.FileStore("store", 1),
    "scripts": lambda: torch.jit.save(torch.jit.script(torch.nn.ReLU()), "script.pt"),
    "scripts_for_phones": lambda: torch.jit.script(torch.nn.ReLU())._save_for_lite_interpreter("phone.ptl"),
    "removes": lambda: os.remove("old.txt"),
    "socket": lambda: socket.socket().bind(("127.0.0.1", 0)),
    "starts": lambda: subprocess.run(["true"], check=True),
}
if len(sys.argv) > 2:
    note_each(sys.argv[1:])
    sys.exit()
mode = sys.argv[1]
affect(mode)
numbers = torch.arange(1000, device="cuda")
if mode == "no_read":
    raise ValueError("Insufficient number of edges")
if int((numbers > 300).sum()) == 0:
    if mode == "exit":
        sys.exit("no edges")
    raise ValueError("Insufficient number of edges")
print("trained on", int((numbers > 300).sum()))
