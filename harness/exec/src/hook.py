# Run by each Python process of a program on a simulated GPU, as its `sitecustomize`. At the end of a process that imported torch it writes torch's
# memory statistics into the folder of the run; where HARNESS_GPU_SNAPSHOT is set, a memory snapshot too, where HARNESS_GPU_OOMS is set, the
# place of each out of memory error, and where HARNESS_GPU_SAMPLES is set, how much torch has allocated, again and again. Where the settings ask for it,
# values of small tensors are computed. Then it runs the sitecustomize that it hides. It imports nothing that Python has not imported by then, and
# changes nothing in processes without torch.
import atexit
import os
import sys

_RUN = os.environ.get("HARNESS_GPU_RUN")
# Where attempts to get memory are noted: on a real GPU in a folder of their own.
_ATTEMPTS = os.environ.get("HARNESS_GPU_LIMITS_RUN") or _RUN
# Enough for hours of most programs; each entry takes some hundred bytes.
_MOST_EVENTS = 500000
# Of an out of memory error.
_MOST_FRAMES = 16
_OWN_PACKAGES = ("torch", "torchvision", "torchaudio", "functorch", "triton")
# The length of an attempt to get memory, and of a free, in the files in which they are noted.
_ATTEMPT_BYTES = 32
# Where the counters of a process tell how much work it submitted: behind three words of eight bytes.
_SUBMITTED_AT = 24
# Of a traceback.
_MOST_LINES = 12
# Between two looks at how much is allocated, in seconds.
_SAMPLE_EVERY = 0.005


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


def _traceback():
    """The last lines of the traceback of what ended the program, where an exception did."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return []
    import traceback

    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return text.rstrip().splitlines()[-_MOST_LINES:]


def _write_statistics(torch):
    import json

    found = {"version": torch.__version__, "rank": os.environ.get("RANK"), "ended_out_of_memory": False, "memory_stats": {}, "problem": None, "traceback": []}
    try:
        # The interpreter keeps the exception that ended the program.
        found["traceback"] = _traceback()
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


def _frames(frame):
    """The innermost frames of a stack that are not of torch's own packages."""
    site = os.path.dirname(os.path.dirname(sys.modules["torch"].__file__))
    own = tuple(os.path.join(site, package) + os.sep for package in _OWN_PACKAGES) + (os.path.abspath(__file__), "<frozen ")
    found = []
    while frame is not None and len(found) < _MOST_FRAMES:
        file = frame.f_code.co_filename
        if not os.path.abspath(file).startswith(own) and not file.startswith(own):
            found.append({"file": file, "line": frame.f_lineno or 0, "name": frame.f_code.co_name})
        frame = frame.f_back
    return found


def _write_error_place(device, size, total, free):
    """Called by torch before it raises an OutOfMemoryError, also in threads of its backward pass, where no frames of Python are."""
    import json
    import threading

    try:
        attempts = os.path.getsize(os.path.join(_ATTEMPTS, "%d.attempts" % os.getpid())) // _ATTEMPT_BYTES
        frames = _frames(sys._getframe()) or _frames(sys._current_frames().get(threading.main_thread().ident))
        with open(os.path.join(_RUN, "ooms-%d.jsonl" % os.getpid()), "a") as file:
            file.write(json.dumps({"attempts": attempts, "frames": frames}) + "\n")
    except Exception as error:
        sys.stderr.write("harness: the place of an out of memory error could not be told: %s\n" % error)


def _tell_error_places(module):
    def attach():
        try:
            sys.modules["torch"]._C._cuda_attach_out_of_memory_observer(_write_error_place)
        except Exception:
            pass  # Only the native allocator has observers; without one the places are not known.

    module._lazy_call(attach)


def _sample_allocated(module):
    """Notes how much torch has allocated on each device, with how much work was submitted by then, where that has changed. On a real GPU, where nobody
    counts work, attempts to get memory and frees are counted instead."""
    import threading
    import time

    torch = sys.modules["torch"]

    def sample():
        try:
            if _ATTEMPTS == _RUN:
                counters = os.open(os.path.join(_RUN, "%d.counters" % os.getpid()), os.O_RDONLY)
                count = lambda: int.from_bytes(os.pread(counters, 8, _SUBMITTED_AT), "little")
            else:
                noted = [os.open(os.path.join(_ATTEMPTS, "%d.%s" % (os.getpid(), kind)), os.O_RDONLY) for kind in ("attempts", "frees")]
                count = lambda: sum(os.fstat(file).st_size // _ATTEMPT_BYTES for file in noted)
            devices, last = range(torch.cuda.device_count()), {}
            with open(os.path.join(_RUN, "samples-%d" % os.getpid()), "w", 1) as file:
                while True:
                    submitted = count()
                    for device in devices:
                        allocated = torch.cuda.memory_stats(device).get("allocated_bytes.all.current", 0)
                        if last.get(device) != allocated:
                            last[device] = allocated
                            file.write("%d %d %d\n" % (submitted, device, allocated))
                    time.sleep(_SAMPLE_EVERY)
        except Exception:
            pass  # The program ends, or its allocator has no statistics: what was sampled so far is there.

    module._lazy_call(lambda: threading.Thread(target=sample, name="harness-samples", daemon=True).start())


def _record_history(module):
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


def _with_cuda(module):
    if os.environ.get("HARNESS_GPU_SNAPSHOT"):
        _record_history(module)
    if os.environ.get("HARNESS_GPU_OOMS"):
        _tell_error_places(module)
    if os.environ.get("HARNESS_GPU_SAMPLES"):
        _sample_allocated(module)


def _compute_small_values(torch):
    from importlib import util

    spec = util.spec_from_file_location("harness_small_values", os.path.join(os.path.dirname(os.path.abspath(__file__)), "small_values.py"))
    small_values = util.module_from_spec(spec)
    spec.loader.exec_module(small_values)
    small_values.begin()


class _ModuleFinder:
    """Finds one module as all others do, and calls back when it was executed."""

    def __init__(self, module, then):
        self.module = module
        self.then = then

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_tell(module):
                execute(module)
                self.then(module)

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


# One that is hidden may be the hook of another `harness exec` around this one: the process is told of once.
if _RUN and not hasattr(sys, "_harness_hook"):
    sys._harness_hook = True
    atexit.register(_at_exit)
    if any(os.environ.get("HARNESS_GPU_" + wanted) for wanted in ("SNAPSHOT", "OOMS", "SAMPLES")):
        sys.meta_path.insert(0, _ModuleFinder("torch.cuda", _with_cuda))
    if "values=small" in os.environ.get("HARNESS_GPU", "").split(";"):
        sys.meta_path.insert(0, _ModuleFinder("torch", _compute_small_values))
_run_the_hidden_one()
