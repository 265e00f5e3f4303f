"""Writes a memory snapshot whenever PyTorch runs out of GPU memory.

    python -m harness.observe train.py --batch 64     # around an unchanged program
    import harness.observe                            # in a program, before or after `import torch`
    HARNESS_OBSERVE=1 python train.py                 # also in the processes that it starts

Each fatal out-of-memory error writes a snapshot, whose name contains job, rank, time and number, for `harness explain`. Settings, from the environment:

    HARNESS_OBSERVE_DIR     the folder [default: the current folder]
    HARNESS_OBSERVE_KEEP    snapshots to keep per process: later ones replace the oldest [default: 4]
    HARNESS_OBSERVE_EVENTS  allocations and frees to remember [default: 100000]

The observer never fails the program: if it cannot work, it says so once on standard error.
"""
import gc
import importlib.abc
import importlib.util
import os
import pickle
import re
import runpy
import sys
import time

# The variables of launchers and schedulers, most specific first.
JOBS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "RAY_JOB_ID", "JOB_NAME", "HOSTNAME")
RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


class Observer:
    def __init__(self, torch):
        self.torch = torch
        self.folder = os.environ.get("HARNESS_OBSERVE_DIR") or "."
        self.kept = number("HARNESS_OBSERVE_KEEP", 4)
        self.written = []
        self.errors = 0

    def start(self):
        """Records the history of allocations with Python stacks, and waits for errors."""
        events = number("HARNESS_OBSERVE_EVENTS", 100_000)
        self.torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=events)
        self.torch._C._cuda_attach_out_of_memory_observer(self.write)

    def write(self, device, *_):
        try:
            self.errors += 1
            os.makedirs(self.folder, exist_ok=True)
            path = os.path.join(self.folder, self.name(device))
            dump(self.torch, path + ".unfinished")
            os.replace(path + ".unfinished", path)
            self.written.append(path)
            while len(self.written) > self.kept:
                os.remove(self.written.pop(0))
            say(f"out of memory on GPU {device}: see `harness explain {path}`")
        except Exception as error:
            say(f"no snapshot: {error}")

    def name(self, device):
        moment = time.strftime("%Y%m%d-%H%M%S")
        restart = first(RESTARTS, None)
        restarts = [f"restart{restart}"] if restart else []
        parts = [first(JOBS, "job"), f"rank{first(RANKS, '0')}", f"gpu{device}", *restarts, moment, str(os.getpid()), str(self.errors)]
        return re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(parts)) + ".pickle"


def dump(torch, path):
    """Writes a snapshot with the addresses of the program's parameters, gradients and optimizer state, from which `harness explain` takes categories."""
    snapshot = torch.cuda.memory._snapshot()
    try:
        snapshot["harness_tensors"] = tensors(torch)
    except Exception as error:
        say(f"the snapshot does not name the program's tensors: {error}")
    with open(path, "wb") as file:
        pickle.dump(snapshot, file)


def tensors(torch):
    found = {"parameters": set(), "gradients": set(), "optimizer_state": set()}

    def add(category, tensor):
        if torch.is_tensor(tensor) and tensor.is_cuda:
            found[category].add(tensor.untyped_storage().data_ptr())

    # `isinstance` would run code of the program's objects.
    for item in gc.get_objects():
        if issubclass(type(item), torch.nn.Module):
            for tensor in [*item._parameters.values(), *item._buffers.values()]:
                add("parameters", tensor)
                add("gradients", getattr(tensor, "grad", None))
        elif issubclass(type(item), torch.optim.Optimizer):
            for state in item.state.values():
                for tensor in state.values():
                    add("optimizer_state", tensor)
    return {category: sorted(addresses) for category, addresses in found.items()}


def first(names, otherwise):
    # Launchers without a job name write `none`.
    return next((os.environ[name] for name in names if os.environ.get(name, "none") not in ("", "none")), otherwise)


def number(name, otherwise):
    try:
        return int(os.environ.get(name) or otherwise)
    except ValueError:
        say(f"{name} is not a number, so it is {otherwise}")
        return otherwise


def say(message):
    print(f"harness.observe: {message}", file=sys.stderr, flush=True)


def observe(torch):
    """Observes as soon as the program uses the GPU. Processes without a GPU are left alone."""
    try:
        torch.cuda._lazy_call(Observer(torch).start)
    except Exception as error:
        say(f"not observed: {error}")


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Observes when the program imports torch."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        observe(module)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m harness.observe PROGRAM.py [ARGUMENTS]…")
    import harness.observe  # noqa: F401 (under its own name, so that the program can import it too)

    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
elif "torch" in sys.modules:
    observe(sys.modules["torch"])
else:
    sys.meta_path.insert(0, AfterImport())
