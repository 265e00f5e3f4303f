"""What the values of small tensors cost: python ci/values_cost.py [PROGRAM]...

Trains models on simulated GPUs with `--values zeros` and with the default, and prints the instructions of an iteration, which Callgrind counts, and the
ratio: the median of three runs. `HARNESS` names the program, HARNESS_SIMULATED_GPU_LIBRARY an optimized library for it. Needs torch in this Python, and
valgrind.
"""
import gc
import os
import subprocess
import sys
import tempfile

ROUNDS, ITERATIONS = 3, 40
VALUES = "zeros", "copies"


def resnet50(torch):
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self, channels, width, stride):
            super().__init__()
            convolution = lambda *shape, **options: [nn.Conv2d(*shape, bias=False, **options), nn.BatchNorm2d(shape[1])]
            act = lambda: nn.ReLU(inplace=True)
            first, second = convolution(channels, width, 1), convolution(width, width, 3, stride=stride, padding=1)
            self.main = nn.Sequential(*first, act(), *second, act(), *convolution(width, 4 * width, 1))
            changes = stride > 1 or channels != 4 * width
            self.side = nn.Sequential(*convolution(channels, 4 * width, 1, stride=stride)) if changes else nn.Identity()
            self.act = act()

        def forward(self, x):
            return self.act(self.main(x) + self.side(x))

    layers, channels = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)], 64
    for count, width, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for index in range(count):
            layers.append(Block(channels, width, 1 if index else stride))
            channels = 4 * width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)).cuda()
    inputs, labels = torch.randn(32, 3, 224, 224, device="cuda"), torch.zeros(32, dtype=torch.long, device="cuda")
    return _trained(torch, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4), inputs, labels)


def _mlp(torch):
    nn = torch.nn
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)).cuda()
    return model, torch.randn(64, 1024, device="cuda"), torch.zeros(64, dtype=torch.long, device="cuda")


def _trained(torch, model, optimizer, inputs, labels):
    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def mlp_adam(torch):
    model, inputs, labels = _mlp(torch)
    return _trained(torch, model, torch.optim.Adam(model.parameters()), inputs, labels)


def mlp_scaler(torch):
    """AdamW, autocast, gradient clipping and a scaler."""
    model, inputs, labels = _mlp(torch)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler()

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


PROGRAMS = {program.__name__: program for program in (resnet50, mlp_adam, mlp_scaler)}


def run(name):
    """Runs iterations after a line arrives."""
    import torch

    step = PROGRAMS[name](torch)
    for _ in range(6):
        step()
    gc.collect()
    gc.freeze()
    gc.disable()
    print("ready", os.getpid(), flush=True)
    sys.stdin.readline()
    for _ in range(ITERATIONS):
        step()
    print("done", flush=True)
    sys.stdin.readline()


def count(name, values, folder):
    """The instructions of an iteration."""
    harness, counts = os.environ.get("HARNESS", "harness"), os.path.join(folder, "counts")
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={counts}"]
    command = [harness, "exec", "--memory", "80GiB", "--values", values, "--", *valgrind, sys.executable, os.path.abspath(__file__), "run", name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        switch = lambda state, pid: subprocess.run(["callgrind_control", "-i", state, pid], check=True, capture_output=True)
        answer = process.stdout.readline().split()
        if answer[:1] != ["ready"]:
            sys.exit(f"{name} did not start: {' '.join(command)}")
        switch("on", answer[1])
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        switch("off", answer[1])
        process.stdin.write("\n")
    with open(counts) as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("totals:")) / ITERATIONS


def main(names):
    print("program", *(f"{values} [instructions]" for values in VALUES), "more", sep="\t")
    for name in names or PROGRAMS:
        with tempfile.TemporaryDirectory() as folder:
            zeros, copies = (sorted(count(name, values, folder) for _ in range(ROUNDS))[ROUNDS // 2] for values in VALUES)
        print(name, f"{zeros:.0f}", f"{copies:.0f}", f"{copies / zeros - 1:+.1%}", sep="\t", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(sys.argv[2])
    else:
        main(sys.argv[1:])
