# Run by each Python process of a program on a simulated GPU, as its `sitecustomize`. At the end of a process that imported torch it writes torch's
# memory statistics into the folder of the run; where HARNESS_GPU_SNAPSHOT is set, a memory snapshot too. Then it runs the sitecustomize that
# it hides. It imports nothing that Python has not imported by then, and changes nothing in processes without torch.
import atexit
import os
import sys

_RUN = os.environ.get("HARNESS_GPU_RUN")
# Enough for hours of most programs; each entry takes some hundred bytes.
_MOST_EVENTS = 500000


def _write(name, write):
    """Writes a file into the folder of the run; it appears whole or not at all."""
    path = os.path.join(_RUN, name)
    write(path + ".unfinished")
    os.replace(path + ".unfinished", path)


def _write_snapshot(torch):
    name = "snapshot-%d.pickle" % os.getpid()
    if torch.cuda.is_initialized() and not os.path.exists(os.path.join(_RUN, name)):
        _write(name, torch.cuda.memory._dump_snapshot)


def _statistics(torch):
    """Of each device that was used, by index."""
    if not torch.cuda.is_initialized():
        return {}
    by_device = {str(device): torch.cuda.memory_stats(device) for device in range(torch.cuda.device_count())}
    return {device: stats for device, stats in by_device.items() if any(stats.values())}


def _write_statistics(torch):
    import json

    found = {"version": torch.__version__, "rank": os.environ.get("RANK"), "ended_out_of_memory": False, "memory_stats": {}, "problem": None}
    try:
        # The interpreter keeps the exception that ended the program.
        found["ended_out_of_memory"] = isinstance(getattr(sys, "last_value", None), torch.OutOfMemoryError)
        found["memory_stats"] = _statistics(torch)
    except Exception as error:
        found["problem"] = str(error)

    def write(path):
        with open(path, "w") as file:
            json.dump(found, file)

    _write("torch-%d.json" % os.getpid(), write)


def _at_exit():
    torch = sys.modules.get("torch")
    # A torch that failed to import has no version.
    if not hasattr(torch, "__version__") or not hasattr(torch, "cuda"):
        return
    _write_statistics(torch)
    if os.environ.get("HARNESS_GPU_SNAPSHOT"):
        _write_snapshot(torch)


def _when_cuda_is_imported(module):
    """Has torch record its memory history from the moment at which it opens the GPU."""
    import threading

    torch = sys.modules["torch"]

    def record():
        # Call stacks of allocations only: with those of frees torch 2.11 breaks checkpointing that stops early.
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=_MOST_EVENTS)

    module._lazy_call(record)
    earlier = threading.excepthook

    def of_thread(failed):
        if issubclass(failed.exc_type, torch.OutOfMemoryError):
            _write_snapshot(torch)
        earlier(failed)

    threading.excepthook = of_thread


class _CudaFinder:
    """Finds `torch.cuda` as all others do, and calls back when it was executed."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch.cuda":
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_tell(module):
                execute(module)
                _when_cuda_is_imported(module)

            spec.loader.exec_module = execute_and_tell
        return spec


def _run_the_hidden_one():
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    this = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", this)


if _RUN:
    atexit.register(_at_exit)
    if os.environ.get("HARNESS_GPU_SNAPSHOT"):
        sys.meta_path.insert(0, _CudaFinder())
_run_the_hidden_one()
