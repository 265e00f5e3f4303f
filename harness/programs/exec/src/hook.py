# The `sitecustomize` of each Python process of a program on a simulated GPU.
# - It ends the process if the library of HARNESS_GPU_EXPECTED is not loaded: without it, the program would use a real GPU.
# - When a process that imported torch exits, it writes torch's memory statistics into the folder of the run. A process that may be killed has written
#   what is known until then.
# - HARNESS_GPU_SNAPSHOT also writes a memory snapshot, then and at out of memory errors (`events` and `stacks`: only at the end, without and with call stacks), HARNESS_GPU_OOMS
#   the call stack of each out of memory error, and HARNESS_GPU_SAMPLES samples of the bytes that torch has allocated. The value `cpu` in HARNESS_GPU
#   computes operations on the CPU. HARNESS_GPU_COPIES offers copies.
# - Each process writes that the hook runs in it, and the first effect outside of the program's processes, which a second run would repeat.
# - Stacks of all threads are written for the simulated GPU when a collective waits long, and for `harness exec` when all ranks are idle. Each rank
#   writes its number.
# Finally it runs the sitecustomize that it hides. It only imports modules that Python has already loaded, and changes nothing in processes without torch.
import os
import sys
from io import open  # The program may replace that of `builtins`.

_RUN = os.environ.get("HARNESS_GPU_RUN")
# The folder with the files of allocation attempts.
_ATTEMPTS = os.environ.get("HARNESS_GPU_LIMITS_RUN") or _RUN
# Snapshots serve only for replays. The program must not notice them.
_EVENTS_ONLY = os.environ.get("HARNESS_GPU_SNAPSHOT") in ("events", "stacks")
# Enough for hours of most programs; each event takes a few hundred bytes.
_MOST_EVENTS = 500000
# Frames recorded for an out of memory error.
_MOST_FRAMES = 16
_OWN_PACKAGES = ("torch", "torchvision", "torchaudio", "functorch", "triton", "safetensors")
# Imported by the first optimizer, which takes about a second. Before torch 2.11 its import creates temporary files.
_LATE = "torch._dynamo"
# Bytes of one record in the files of allocation attempts and of frees.
_ATTEMPT_BYTES = 32
# The first byte of an attempt to allocate from CUDA's own pools.
_MALLOC_ASYNC = 2
# The quantities whose peaks are kept if the program resets them.
_WITH_PEAKS = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
# Exceptions looked at from one to its cause.
_MOST_CAUSES = 16
# Texts of errors of PyTorch, Triton, CuPy, JAX, TensorFlow and ONNX Runtime if a library has no memory for a handle, a plan or a module.
_ERRORS_OF_LIBRARIES = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS failure 3: ",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "insufficient resources when calling `cusparseCreate",
    "CUFFT_ALLOC_FAILED",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "Triton Error [CUDA]: out of memory",
)
# Lines kept of a traceback.
_MOST_LINES = 12
# The signal after the first real-time signal that makes a process write its stacks.
_STACK_SIGNAL = 13
# Marks the processes that a rank starts.
_IS_OF_RANK = "HARNESS_GPU_OF_RANK"
# Whether the simulated GPU knows the values of small copies.
_IS_COPIES = _ATTEMPTS == _RUN and '"values":"copies"' in os.environ.get("HARNESS_GPU", "")
# Whether the GPU shares the host's memory.
_SHARES_MEMORY = '"shared_memory":"none"' not in os.environ.get("HARNESS_GPU", '"shared_memory":"none"')
# Whether the CPU computes operations.
_IS_CPU = '"values":"cpu"' in os.environ.get("HARNESS_GPU", "")
# Later places of reads of values are not noted.
_MOST_PLACES_OF_READS = 256
# Functions that run in each thread of Python and of RPC.
_STARTS_OF_THREADS = ("_bootstrap_inner", "_run_function")
# Seconds between two samples of the allocated bytes.
_SAMPLE_EVERY = 0.005


def _require_library():
    """Ends the process if the dynamic linker did not load the library that `harness exec` named."""
    name = os.environ.get("HARNESS_GPU_EXPECTED")
    if not name:
        return
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        if any(line.rstrip().endswith("/" + name) for line in maps):
            return
    _write("not-loaded", lambda path: open(path, "w").close())
    sys.stderr.write("harness: the dynamic linker did not load %s, so this program would use a real GPU: it is stopped\n" % name)
    sys.stderr.flush()
    os._exit(70)


def _write(name, write):
    """Writes a file into the folder of the run, atomically."""
    path = os.path.join(_RUN, name)
    write(path + ".unfinished")
    os.replace(path + ".unfinished", path)


def _write_snapshot(torch, kind="snapshot"):
    name = "%s-%d.pickle" % (kind, os.getpid())
    if torch.cuda.is_initialized() and not (kind == "snapshot" and os.path.exists(os.path.join(_RUN, name))):
        _write(name, lambda path: _dump_snapshot(torch, path))


def _dump_snapshot(torch, path):
    """Writes a snapshot with the statistics of pinned host memory."""
    import pickle

    snapshot = torch.cuda.memory._snapshot()
    if hasattr(torch, "_harness_remove_own_frames"):
        _remove_own_frames(snapshot)
    try:
        host = _host_statistics(torch)
        # A plain dictionary needs no code of another module.
        snapshot.update({"harness_host_memory": {"torch": str(torch.__version__), **host}} if host else {})
    except Exception:
        pass  # Another version of torch.
    with open(path, "wb") as file:
        pickle.dump(snapshot, file)


def _remove_own_frames(snapshot):
    """Removes the frames of this folder, which run operations for `--values cpu`, and of what they call."""
    here = os.path.dirname(os.path.abspath(__file__)) + os.sep
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    for item in blocks + [event for trace in snapshot["device_traces"] for event in trace]:
        frames = item.get("frames") or []
        # Ours also start threads.
        start = next((index for index, frame in enumerate(frames) if frame["name"] in _STARTS_OF_THREADS), len(frames))
        own = [index for index, frame in enumerate(frames) if frame["filename"].startswith(here)]
        if own:
            operation = max((index for index in own if index < start), default=-1)
            item["frames"] = [frame for index, frame in enumerate(frames) if index > operation and index not in own]


def _statistics(torch):
    """The statistics of each used device, by index."""
    if not torch.cuda.is_initialized():
        return {}
    by_device = {str(device): torch.cuda.memory_stats(device) for device in range(torch.cuda.device_count())}
    if getattr(torch.cuda, "get_allocator_backend", str)() == "cudaMallocAsync":
        _count_failures(by_device)
    return {device: stats for device, stats in by_device.items() if any(stats.values())}


def _count_failures(by_device):
    """The asynchronous allocator of torch raises each failure of CUDA, but does not count it."""
    try:
        with open(os.path.join(_ATTEMPTS, "%d.attempts" % os.getpid()), "rb") as file:
            noted = file.read()
    except FileNotFoundError:
        return
    for at in range(0, len(noted), _ATTEMPT_BYTES):
        call, outcome, device = noted[at : at + 3]
        if call == _MALLOC_ASYNC and outcome:
            by_device[str(device)]["num_ooms"] += 1


# What is known of exceptions that the interpreter does not keep: of failed tests (`test`), handled while the program exits (`exit`), and of threads
# (`thread`). Exceptions would keep memory of the GPU.
_ends = {}
# Set if the program exits with code 0 while it handles an out of memory error.
_ended_in_handler = False


def _behind(error):
    """The exception whose handling ends with this one, if this one only requests an exit or reports that of another process."""
    for _ in range(_MOST_CAUSES):
        is_report = any(isinstance(getattr(error, name, None), int) for name in ("exit_code", "returncode")) or type(error).__name__ == "ChildFailedError"
        if not isinstance(error, SystemExit) and not is_report:
            break
        error = error.__cause__ or error.__context__
    return error


def _is_by(is_one, error):
    """Returns whether `is_one` accepts an exception, or the cause that it names. A group has only such exceptions."""
    for _ in range(_MOST_CAUSES):
        group = getattr(error, "exceptions", None)
        if isinstance(group, tuple) and group:
            return all(_is_by(is_one, each) for each in group)
        if error is None or is_one(error):
            return error is not None
        error = error.__cause__
    return False


def _is_out_of_memory(error):
    of_torch = getattr(sys.modules.get("torch"), "OutOfMemoryError", ())
    return isinstance(error, of_torch) or _libraries.is_out_of_memory(error)


def _is_of_library(error):
    """Returns whether a library had no memory for a handle, a plan or a module."""
    return any(text in str(error) for text in _ERRORS_OF_LIBRARIES)


def _end(error):
    """Describes the exception that ended the process; an empty dictionary if there is none."""
    if error is None:
        return {}
    import traceback

    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    found = {"traceback": text.rstrip().splitlines()[-_MOST_LINES:], "ended_out_of_memory": False, "ended_by_library": False, "error": None}
    behind = _behind(error)
    if behind is not None:
        found["ended_out_of_memory"] = _is_by(_is_out_of_memory, behind)
        found["ended_by_library"] = _is_by(_is_of_library, behind)
        if not found["ended_out_of_memory"]:
            lines = "".join(traceback.format_exception_only(type(behind), behind)).splitlines()
            found["error"] = next(line for line in lines if not line.startswith(" "))
    return found


def _note_end(kind, error, exits=None):
    """Notes an exception that may end the process. The frame that exits while it handles the exception is of the program, or of a package such as Hydra that
    has printed an exception which the program did not catch. Of several failed tests or threads, the first that did not run out of memory stays. A thread
    that runs out of memory does not end the program."""
    try:
        is_known = hasattr(sys.modules.get("torch"), "OutOfMemoryError") or _libraries.imported()
        if error is None or not is_known or (kind != "exit" and _ends.get(kind, {}).get("error")):
            return
        end = _end(_behind(error) if kind == "exit" else error)
        if end and (kind != "thread" or end["error"]):
            caught = exits is not None and not any(folder in exits.f_code.co_filename for folder in ("site-packages", "dist-packages"))
            _ends[kind] = {**end, "caught": caught}
    except Exception as failure:  # An exception that cannot be printed.
        _guard.let_through(failure)


def _note_exit(status, error, exits):
    """Notes the exception that the program handles when it exits."""
    global _ended_in_handler
    if status is None or isinstance(status, int) and status == 0:
        _ended_in_handler = _is_by(_is_out_of_memory, error)
    else:
        _note_end("exit", error, exits)


def _uncaught():
    """The exception that left the program, if there is one. Interactive shells also set `sys.last_value` when they show an exception. Such an exception did
    not leave the outermost frame, which calls the shell."""
    error = getattr(sys, "last_value", None)
    left = getattr(error, "__traceback__", None)
    return None if left is not None and left.tb_frame.f_back is not None else error


def _how_it_ended():
    return _ends.get("test") or _end(_uncaught()) or _ends.get("exit") or _ends.get("thread") or {}


def _note_exits():
    """Notes the exception that is handled when `sys.exit` is called."""

    def note(status=None, /):
        threading = sys.modules.get("threading")
        is_main = threading is None or threading.current_thread() is threading.main_thread()
        if is_main:
            _note_exit(status, sys.exc_info()[1], _guard.caller())

    _guard.before(sys, "exit", note)


def _note_errors_of_threads(module):
    """Notes errors of threads, which can make the program exit."""

    _guard.before(module, "excepthook", lambda failed: _note_end("thread", getattr(failed, "exc_value", None)))


def _note_failed_tests(module):
    """Notes the exceptions of tests that pytest reports as failed."""

    def note_failed(check, call, report):
        has_failed = check(call, report)
        if has_failed:
            _note_end("test", call.excinfo.value)
        return has_failed

    _guard.wrap(module, "check_interactive_exception", note_failed)


def _note_failed_cases(module):
    """Notes the exceptions of tests that unittest reports as failed."""

    def note_and_add(add, result, *given):
        if given[-1] is not None:
            _note_end("test", given[-1][1])
        return add(result, *given)

    for name in ("addError", "addFailure", "addSubTest"):
        _guard.wrap(module.TestResult, name, note_and_add)


# The peaks of pinned memory, also those from before a reset.
_host_peaks = {}


def _host_statistics(torch):
    """The numbers of torch's allocator of pinned memory, if this version counts them and the program used it. Peaks are those of the whole process."""
    if getattr(torch._C, "_cuda_isInBadFork", bool)():
        return None  # They are those of the parent.
    # `torch.cuda.host_memory_stats()` has none before a program uses a GPU.
    of = getattr(torch._C, "_cuda_hostMemoryStats", dict)()
    found = {name: count for name, count in of.items() if not isinstance(count, dict)}
    found.update({"%s.%s" % (name, kind): count for name, kinds in of.items() if isinstance(kinds, dict) for kind, count in kinds.items()})
    for name in [name for name in found if name.endswith(".peak")]:
        found[name] = _host_peaks[name] = max(_host_peaks.get(name, 0), found[name])
    return found if any(_host_peaks.values()) else None


# Figures from before a reset, by device, and the devices of all resets of peaks.
_earlier = {}
_resets = []


def _keep_peaks(torch, device, with_counters):
    """Keeps the peaks of a device that the program is about to reset, and the counters if it resets them too."""
    device = torch.cuda.current_device() if device is None else int(device)
    statistics, kept = torch._C._cuda_memoryStats(device), _earlier.setdefault(str(device), {})
    before = dict(kept)
    for quantity in _WITH_PEAKS:
        name = quantity + ".all.peak"
        kept[name] = max(kept.get(name, 0), statistics[quantity]["all"]["peak"])
    for name in ("num_alloc_retries", "num_ooms") if with_counters else ():
        kept[name] = kept.get(name, 0) + statistics[name]
    if not with_counters:
        _resets.append(device)
    if kept != before:
        # The process may be killed.
        _write_statistics(torch, is_end=False)


def _keep_host_peaks(torch):
    """Keeps the peaks of pinned memory that the program is about to reset."""
    before = dict(_host_peaks)
    _host_statistics(torch)
    if _host_peaks != before:
        # The process may be killed.
        _write_statistics(torch, is_end=False)


def _note_resets(torch):
    """Keeps the peaks of the whole process if the program resets them."""

    def wrap(name):
        def keep(*device):
            try:
                if "HostMemory" in name:
                    _keep_host_peaks(torch)
                else:
                    _keep_peaks(torch, *(device or [None]), "Accumulated" in name)
            except RuntimeError:
                pass  # Only the native allocator has statistics.

        _guard.before(torch._C, name, keep)

    names = ("_cuda_resetPeakMemoryStats", "_cuda_resetAccumulatedMemoryStats", "_accelerator_resetPeakStats", "_accelerator_resetAccumulatedStats", "_cuda_resetPeakHostMemoryStats")
    for name in names:
        if hasattr(torch._C, name):
            wrap(name)


def _write_statistics(torch, is_end=True):
    found = {"version": torch.__version__, "rank": os.environ.get("RANK"), "ended_out_of_memory": False, "memory_stats": {}, "problem": None}
    found["statistics"] = "reported" if is_end else "at_least"
    found["earlier"], found["resets"], found["host_memory_stats"] = _earlier, len(_resets), None
    # The 22nd field, after the name, which can contain spaces.
    with open("/proc/self/stat", errors="surrogateescape") as stat:
        found["started"] = int(stat.read().rpartition(")")[2].split()[19])
    found["engine"], found["engines"] = _engine or None, list(_engines.values())
    found["late_import"] = _LATE if _LATE in sys.modules and torch.__version__ >= (2, 11) else None
    found["not_computed"] = torch._harness_not_computed() if hasattr(torch, "_harness_not_computed") else None
    try:
        if is_end:
            found.update(_how_it_ended())
            found["ended_in_handler"] = _ended_in_handler
        found["memory_stats"] = _statistics(torch)
        found["host_memory_stats"] = _host_statistics(torch)
    except Exception as error:
        _guard.let_through(error)
        found["problem"] = str(error)

    _write("torch-%d.json" % os.getpid(), lambda path: _write_text(path, _guard.as_json(found)))


# The last statistics of each library other than torch, by its name, and why a library has none. A library closes its devices at the end.
_of_libraries = {}
_problems = {}
# Those of libraries that hold nothing, by library, and the bytes that the process holds, by device.
_unused = {}
_left = {}


def _has_used_torch():
    """Whether torch has used a GPU. A program that imports it beside another library may not."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return hasattr(cuda, "is_initialized") and cuda.is_initialized()


def _held():
    """The bytes that this process holds from the driver, by the index of a device that it has requested memory of. A library opens a device, and
    fails in a forked child, if it is asked for others."""
    found = _counters.read(_ATTEMPTS)
    return {str(index): device.used for index, device in found.devices.items()} if found else {}


def _ask_libraries():
    devices = _held()
    for device, used in devices.items():
        _left.setdefault(device, {"reserved_bytes.all.current": used})
    published, problems = _libraries.published([int(device) for device in devices])
    _problems.update(problems)
    for name, found in _libraries.with_kept_peaks(published).items():
        (_of_libraries if _libraries.is_in_use(found) else _unused)[name] = found


def _write_statistics_of_libraries(is_end=True, asks=True):
    """Writes the statistics of the imported libraries that have used a GPU, unless torch writes its own. Names all libraries if none has any."""
    if not _libraries.imported() or _has_used_torch():
        return
    if asks:
        _ask_libraries()
    named = [library for library in _libraries.imported() if not _of_libraries or library.NAME in _of_libraries]
    # Without statistics, what the process holds.
    statistics = _libraries.sum_of(_of_libraries) or next(iter(_unused.values()), _left)
    found = {"rank": os.environ.get("RANK"), "ended_out_of_memory": False, "memory_stats": statistics}
    found["problem"] = next(iter(_problems.values()), None) if not _of_libraries else None
    found["library"] = {"name": " and ".join(library.NAME for library in named), "allocator": " and ".join(map(_libraries.allocator, named))}
    versions = found["library"]["versions"] = {library.NAME: _libraries.version(library) for library in named}
    found["version"] = next(iter(versions.values())) if len(versions) == 1 else ""
    if is_end:
        _note_error_of_library(getattr(sys, "last_value", None))
    found["library"]["errors"] = _libraries.errors
    with open("/proc/self/stat", errors="surrogateescape") as stat:
        found["started"] = int(stat.read().rpartition(")")[2].split()[19])
    found["statistics"] = "reported" if is_end else "at_least"
    found.update({**_how_it_ended(), "ended_in_handler": _ended_in_handler} if is_end else {})
    _write("torch-%d.json" % os.getpid(), lambda path: _write_text(path, _guard.as_json(found)))


def _note_error_of_library(error, frame=None):
    """Counts an out of memory error of a library that has reached the program, and ends the failures that last until then."""
    stack = None if error is None else _libraries.stack_of_new_error(error, frame)
    if stack is None:
        return
    _libraries.count_error()
    if os.environ.get("HARNESS_GPU_OOMS"):
        _append_error_place("ooms", stack[:_MOST_FRAMES])
    if "HARNESS_GPU" in os.environ:
        import ctypes

        ctypes.CDLL(_core()).harness_failures_end()


def _note_library(module):
    """Names a library, in case that the process is killed, and writes its statistics before its own exit handler, which closes its devices."""
    _guard.at_exit(lambda: _without_space(_write_statistics_of_libraries))
    _libraries.note_import(module)
    _libraries.watch_handled_errors(_note_error_of_library)
    try:
        _write_statistics_of_libraries(is_end=False, asks=False)
    except OSError:
        pass  # A full disk.
    if _copies and "torch" not in sys.modules:
        _copies.offer_now(_core, _take_over)


def _forget_libraries():
    """The statistics of a parent are not those of its child."""
    _of_libraries.clear()
    _problems.clear()
    _unused.clear()
    _left.clear()
    _errors.clear()
    _libraries.forget()


def _at_exit():
    torch = sys.modules.get("torch")
    # A torch whose import failed has no version.
    if not hasattr(torch, "__version__") or not hasattr(torch, "cuda") or (_libraries.imported() and not _has_used_torch()):
        # The libraries may have closed their devices.
        _write_statistics_of_libraries(asks=False)
        others = [name for name in _OTHER_FRAMEWORKS if name in sys.modules]
        if others:
            _mark(*others)
        return
    _write_statistics(torch)
    if _SHARES_MEMORY:
        # Notes how much of it is in use.
        _memory_of_machine()
    if os.environ.get("HARNESS_GPU_SNAPSHOT"):
        try:
            _write_snapshot(torch)
        except Exception as error:
            _guard.let_through(error)
            if not _EVENTS_ONLY:
                sys.stderr.write("harness: cannot write the memory snapshot: %s\n" % error)
    try:
        _write_waits(torch)
    except Exception as error:  # Only one bound of the peak is known then.
        _guard.let_through(error)
    if _is_copy:
        import gc

        # Otherwise the interpreter searches all modules for garbage at its end, which takes longer than most runs.
        gc.freeze()


def _memory_of_machine():
    """The free and the total memory of a machine whose GPU shares it with the host."""
    import ctypes

    free, total = ctypes.c_uint64(), ctypes.c_uint64()
    ctypes.CDLL(_core()).harness_memory_of_machine(ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def _with_memory_of_machine(psutil):
    """Makes psutil report the memory of the machine. On such machines, programs ask it in place of CUDA, which does not count cached files as free."""

    def virtual_memory(measure):
        measured, (free, total) = measure(), _memory_of_machine()
        used = total - free
        known = {"total": total, "available": free, "free": free, "used": used, "percent": round(100 * used / total, 1)}
        return measured._replace(**{name: known.get(name, 0) for name in measured._fields})

    _guard.wrap(psutil, "virtual_memory", virtual_memory)


def _without_space(write):
    """Reports in one line that a function cannot write its file, as on a full disk."""
    try:
        write()
    except OSError as error:
        sys.stderr.write("harness: cannot write the figures of this process: %s\n" % error)


def _own_modules():
    """The names and the files of the program's modules, which are neither installed nor of the standard library."""
    elsewhere = tuple(folder + os.sep for folder in (os.path.dirname(os.__file__), _RUN))
    for name, module in list(sys.modules.items()):
        try:
            # Other ways would execute a lazy module.
            of = object.__getattribute__(module, "__dict__")
        except AttributeError:
            continue
        file = of.get("__file__")
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        file = os.path.abspath(file)
        if file.startswith(elsewhere) or "site-packages" in file or "dist-packages" in file:
            continue
        if name in ("__main__", "__mp_main__"):
            name = getattr(of.get("__spec__"), "name", None) or os.path.basename(file)
        yield os.fsencode(name)
        yield os.fsencode(file)


def _note_modules():
    if _is_copy:
        return

    def write(path):
        with open(path, "wb") as file:
            file.write(b"".join(text + b"\0" for text in _own_modules()))

    try:
        _write("modules-%d" % os.getpid(), write)
    except Exception as error:  # An unusual module, a full disk, or another user: the program must not notice.
        _guard.let_through(error)


def _write_at_abrupt_ends():
    """Makes processes that end by `os._exit`, as those that `multiprocessing` forks, or execute another program write statistics. Both skip `atexit`."""

    def watch(name):
        def write(*args, **kwargs):
            if name == "_exit":
                _note_exit(kwargs.get("status", *args[:1]), sys.exc_info()[1], _guard.caller())
            _note_modules()
            try:
                torch = sys.modules.get("torch")
                if hasattr(torch, "cuda") and torch.cuda.is_initialized():
                    _at_exit()
                elif _held():
                    _write_statistics_of_libraries()
            except Exception as error:  # A torch whose import has not finished.
                _guard.let_through(error)

        _guard.before(os, name, write)

    for name in ("_exit", "execv", "execve"):
        watch(name)


def _note_ends_of_processes(util):
    """Notes the exceptions that end processes of `multiprocessing`, which prints them."""

    def note():
        error = sys.exc_info()[1]
        if not isinstance(error, SystemExit):
            _note_end("exit", error)

    begin = lambda _: util.Finalize(None, _guard.entry(note), exitpriority=0)
    _guard.at_fork(_ends.clear)
    util.register_after_fork(_note_end, _guard.entry(begin))
    # Spawned processes do not call that function.
    begin(None)


_files = {}  # Whether a file is outside torch's own packages, by its name.


def _is_of_program(file):
    if file not in _files:
        site = os.path.dirname(os.path.dirname(sys.modules["torch"].__file__))
        here = os.path.dirname(os.path.abspath(__file__)) + os.sep
        # Through these modules they open files.
        openers = (os.path.join(os.path.dirname(os.__file__), name) for name in ("contextlib.py", "pathlib"))
        own = (*(os.path.join(site, package) + os.sep for package in _OWN_PACKAGES), here, *openers, "<frozen ")
        _files[file] = not os.path.abspath(file).startswith(own) and not file.startswith(own)
    return _files[file]


def _innermost(frame):
    """The innermost frame of a stack outside torch's own packages."""
    while frame is not None and not _is_of_program(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _frames(frame, most=_MOST_FRAMES):
    """The innermost frames of a stack outside torch's own packages."""
    found = []
    while len(found) < most and (frame := _innermost(frame)) is not None:
        found.append({"file": frame.f_code.co_filename, "line": frame.f_lineno or 0, "name": frame.f_code.co_name})
        frame = frame.f_back
    return found


_errors = []


def _note_error(device, size, total, free):
    """Called by torch before it raises an OutOfMemoryError. The process may be killed before it exits."""
    _errors.append(device)
    if os.environ.get("HARNESS_GPU_OOMS"):
        _write_error_place("ooms")
    torch, number = sys.modules["torch"], len(_errors)
    try:
        if _ATTEMPTS != _RUN:
            # On a real GPU the allocator's own statistics end with the process.
            _write_statistics(torch, is_end=False)
        # A program that searches for its limit has many errors. Of them, the first, second, fourth and so on are written.
        if os.environ.get("HARNESS_GPU_SNAPSHOT") and not _EVENTS_ONLY and number & number - 1 == 0:
            _write_snapshot(torch, "error")
    except Exception as error:
        sys.stderr.write("harness: cannot write the memory snapshot of an out of memory error: %s\n" % error)


def _write_error_place(kind):
    """Writes where the program is, at a failure. Threads of the backward pass have no Python frames; there the main thread's stack is used."""
    import threading

    try:
        _append_error_place(kind, _frames(sys._getframe()) or _frames(sys._current_frames().get(threading.main_thread().ident)))
    except Exception as error:
        _guard.let_through(error)
        sys.stderr.write("harness: cannot record the call stack of a failure: %s\n" % error)


def _append_error_place(kind, frames):
    path = os.path.join(_ATTEMPTS, "%d.attempts" % os.getpid())
    attempts = os.path.getsize(path) // _ATTEMPT_BYTES if os.path.exists(path) else 0
    with open(os.path.join(_RUN, "%s-%d.jsonl" % (kind, os.getpid())), "a") as file:
        file.write(_guard.as_json({"attempts": attempts, "frames": frames}) + "\n")


def _note_errors(module):
    def attach():
        try:
            sys.modules["torch"]._C._cuda_attach_out_of_memory_observer(_guard.entry(_note_error))
        except RuntimeError:
            pass  # Only the native allocator has observers; with others the call stacks stay unknown.

    _guard.when_cuda_begins(module, attach)


def _note_failed_calls(module):
    """Notes the line of each call of a library that fails on request."""

    def begin():
        import ctypes

        hook = _guard.callback(lambda: _write_error_place("calls"))
        library = ctypes.CDLL(_core())
        library.harness_failures_hook(hook)
        _guard.at_exit(lambda: (library.harness_failures_hook(None), hook))

    _guard.when_cuda_begins(module, begin)


def _place(frame):
    """What distinguishes the lines of the program: to find the number of a line, or to hash code, takes longer."""
    if frame is None:
        return None
    code = frame.f_code
    return code.co_filename, code.co_firstlineno, code.co_name, frame.f_lasti


def _note_reads(module):
    """Notes the lines of the program that read values which nothing has computed, and those that ask whether the GPU has finished. Values that only go
    into a file do not count."""

    import ctypes
    import threading

    def noting(name_of_file):
        seen, lines, modules = set(), set(), {}

        def note():
            frame = sys._getframe(1).f_back  # The guard's frame is between both.
            if name_of_file == "reads" and _saved.is_saved(frame):
                return True
            if name_of_file == "polls" and (frame is None or frame.f_code.co_name != "query") and "cupy" not in sys.modules:
                return False  # Torch asks for its pinned memory.
            is_answered = name_of_file == "polls"
            # The code of a frame and `id` take longer: Python raises audit events for them.
            while frame is not None:
                name = frame.f_globals.get("__name__")
                if name not in modules:
                    modules[name] = str(name).startswith("torch.")
                if not modules[name]:
                    break
                frame = frame.f_back
            place = _place(frame)
            if place not in seen:
                main = threading.main_thread().ident
                # Threads of torch that ask are none of the program.
                stands_in = name_of_file == "reads" or threading.get_ident() == main
                frame = _innermost(frame) or (_innermost(sys._current_frames().get(main)) if stands_in else None)
                place = _place(frame)
            if frame is None or place in seen or len(seen) >= _MOST_PLACES_OF_READS:
                return is_answered
            seen.add(place)
            line = _guard.as_json(_frames(frame, 1)[0])
            if line not in lines:
                lines.add(line)
                with open(os.path.join(_RUN, "%s-%d.jsonl" % (name_of_file, os.getpid())), "a") as file:
                    file.write(line + "\n")
            return is_answered

        return _guard.callback(note)

    def begin():
        library = ctypes.CDLL(_core())
        for name, set_hook in (("reads", library.harness_reads_hook), ("polls", library.harness_polls_hook)):
            hook = noting(name)
            set_hook(hook)
            _guard.at_exit(lambda set_hook=set_hook, hook=hook: (set_hook(None), hook))

    _guard.when_cuda_begins(module, begin)


def _sample_allocated(module):
    """Samples the bytes that torch has allocated on each device and writes each change, with the number of work items submitted by then. On a real GPU
    work is not counted, so allocation attempts and frees are counted instead."""
    import time

    torch = sys.modules["torch"]

    def sample():
        try:
            if _ATTEMPTS == _RUN:
                counters = os.open(_counters.path(_RUN), os.O_RDONLY)
                count = lambda: _counters.submitted(counters)
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
            pass  # The program is ending, or its allocator has no statistics. Earlier samples are kept.

    _guard.when_cuda_begins(module, lambda: _guard.start_thread(sample))


def _record_history(module):
    """Makes torch record its memory history once it opens the GPU."""
    import threading

    torch = sys.modules["torch"]

    def record():
        if _EVENTS_ONLY:
            try:
                context = "alloc" if os.environ["HARNESS_GPU_SNAPSHOT"] == "stacks" else None
                torch.cuda.memory._record_memory_history(context=context, stacks="python", max_entries=_MOST_EVENTS)
            except Exception:
                pass  # Only the native allocator has a history.
            return
        # `harness.record` then leaves the history on.
        torch._harness_records = True
        # Only the call stacks of allocations: with those of frees, torch 2.11 breaks checkpointing that stops early.
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=_MOST_EVENTS)

    _guard.when_cuda_begins(module, record)

    def of_thread(failed):
        if issubclass(failed.exc_type, torch.OutOfMemoryError):
            _write_snapshot(torch)

    _guard.before(threading, "excepthook", of_thread)


def _record_history_of_streams(module):
    """Makes torch record its memory history, without call stacks, once it creates a stream. If freed memory then waits for another stream, a replay of the
    history shows the peak of a host that runs ahead of the GPU. The program must not notice the history: a history of its own, earlier or later, is the only
    one."""
    import ctypes

    def follow():
        library, torch = ctypes.CDLL(_core()), sys.modules["torch"]
        memory = torch.cuda.memory
        if not hasattr(library, "harness_history_hook") or not hasattr(torch._C, "_cuda_isHistoryEnabled"):
            return  # The library of a real GPU, whose run is within that of a simulated one, or another version of torch.
        record, put_back = memory._record_memory_history, []

        def end():
            library.harness_history_hook(None)
            _history.clear()
            while put_back:
                put_back.pop()()

        def of_program(original, *args, **kwargs):
            end()
            record(None)
            return original(*args, **kwargs)

        def of_stream():
            try:
                if not _history and not torch._C._cuda_isHistoryEnabled():
                    _history.append(end)
                    record(context=None, max_entries=_MOST_EVENTS)
                    put_back.extend(_guard.wrap(memory, name, of_program) for name in ("_record_memory_history", "_snapshot"))
            except RuntimeError:
                pass  # Only the native allocator has a history.
            return False

        _guard.before(torch._C, "_cuda_setMemoryFraction", _note_fraction)
        hook = _guard.callback(of_stream)
        library.harness_history_hook(hook)
        _guard.at_exit(lambda: (library.harness_history_hook(None), hook))

    _guard.when_cuda_begins(module, follow)


def _note_fraction(fraction, device):
    """Notes the fraction of a device to which the program limits its allocator. The history does not have it."""
    return lambda: _fractions.add((device, fraction))


def _write_waits(torch):
    """Writes which frees waited for other streams, and the history of the memory, if there is no snapshot."""
    counters = _counters.read(_RUN) if _ATTEMPTS == _RUN else None
    if not counters or not counters.waits_of_frees:
        return
    import ctypes

    if _history:
        _history[0]()
        _write("history-%d.pickle" % os.getpid(), lambda path: _dump_snapshot(torch, path))
    path = os.path.join(_RUN, "waits-%d" % os.getpid())
    if not ctypes.CDLL(_core()).harness_deferred_frees(os.fsencode(path + ".unfinished")):
        return
    with open(path + ".unfinished", "a") as file:
        for device, fraction in sorted(_fractions):
            file.write("limit %d %d\n" % (device, fraction * torch.cuda.get_device_properties(device).total_memory))
    os.replace(path + ".unfinished", path)


def _own_module(name):
    """Imports a module of this folder."""
    from importlib import util

    spec = util.spec_from_file_location("harness_" + name.replace(os.sep, "_"), os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".py"))
    sys.modules[spec.name] = module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _core():
    """The path of the library of HARNESS_GPU_EXPECTED."""
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        return next(line.split()[-1] for line in maps if line.rstrip().endswith("/" + os.environ["HARNESS_GPU_EXPECTED"]))


def _take_over():
    """Makes this copy of a process write into the folder of its own run."""
    global _RUN, _ATTEMPTS, _is_copy
    _RUN = _ATTEMPTS = _guard.folder = os.environ["HARNESS_GPU_RUN"]
    _is_copy = True
    _follow_saved()
    _mark()


def _follow_saved():
    """Follows the files of this run with values that nothing has computed."""

    def count():
        import ctypes

        ctypes.CDLL(_core()).harness_reads_note()

    _saved.folder, _saved.count = os.path.join(_RUN, "saved"), count
    _effects.also = _saved.watch if _IS_COPIES else None


def _keep_peaks_before_exec():
    """Keeps the figures of the program that executed this one in the same process."""
    import json

    path = os.path.join(_RUN, "torch-%d.json" % os.getpid())
    if os.path.exists(path):
        with open(path) as file:
            before = json.load(file)
        # That of another library, which this process imported before it used torch, has other figures.
        if "library" in before:
            return
        _resets.extend(range(before["resets"]))
        for found, kept in [(of, _earlier.setdefault(device, {})) for key in ("earlier", "memory_stats") for device, of in before[key].items()]:
            for name in [quantity + ".all.peak" for quantity in _WITH_PEAKS]:
                kept[name] = max(kept.get(name, 0), found.get(name, 0))
            for name in ("num_alloc_retries", "num_ooms"):
                kept[name] = kept.get(name, 0) + found.get(name, 0)


def _begin(module):
    """Writes that the process uses torch, before it may be killed."""
    torch = sys.modules["torch"]

    def begin():
        try:
            _note_resets(torch)
            _keep_peaks_before_exec()
            _write_statistics(torch, is_end=False)
        except Exception as error:  # Another version of torch.
            _guard.let_through(error)

    _guard.when_cuda_begins(module, begin)


def _with_cuda(module):
    _mark("torch")
    if not hasattr(module, "_lazy_call"):
        return
    steps = [_begin]
    if os.environ.get("HARNESS_GPU_SNAPSHOT"):
        steps.append(_record_history)
    elif os.environ.get("HARNESS_GPU_HISTORY"):
        steps.append(_record_history_of_streams)
    steps.append(_note_errors)
    if os.environ.get("HARNESS_GPU_OOMS") and _ATTEMPTS == _RUN:
        steps.append(_note_failed_calls)
    if os.environ.get("HARNESS_GPU_SAMPLES"):
        steps.append(_sample_allocated)
    if _IS_COPIES:
        steps.append(_note_reads)
        steps.append(lambda module: _guard.when_cuda_begins(module, _compute_small_values))
    if _copies:
        steps.append(lambda _: _copies.offer_before_cuda(sys.modules["torch"], _core, _take_over))
    for step in steps:
        _guard.entry(step)(module)


def _compute_values(torch):
    _own_module("random_numbers")
    _own_module("torch_kernel")
    torch._harness_not_computed = _own_module("cpu_values").begin(_core())
    # `harness.snapshot` calls it too.
    torch._harness_remove_own_frames = _remove_own_frames


def _compute_small_values():
    # A torch without operators has no values.
    if hasattr(sys.modules["torch"], "library"):
        _own_module("torch_kernel")
        missing = _own_module("small_values").begin(_core())
        if missing:
            tested = sys.modules["harness_torch_kernel"].TESTED
            _engines["torch"] = {"name": "torch", "version": str(sys.modules["torch"].__version__), "tested": tested, "unchanged": missing}


def _without_values_in_triton(module):
    """Benchmarks write a buffer of the size of the cache before each run, which takes the CPU longer than all else."""
    import torch

    _guard.replace(module, "do_bench", torch._harness_without_values(module.do_bench))


def _without_values_in_inductor(module):
    import torch

    for kind in [kind for kind in vars(module).values() if isinstance(kind, type)]:
        for name in [name for name in vars(kind) if name.startswith("benchmark_gpu")]:
            _guard.replace(kind, name, torch._harness_without_values(getattr(kind, name)))


_is_copy = False
# The function that ends the memory history of this file, if there is one.
_history = []
# The fractions to which the program limits the allocators of devices.
_fractions = set()
# How an inference engine divides the memory of the GPU.
_engine = {}
# The engines that this process imported, by name.
_engines = {}
# The packages of engines that were not imported yet. A file of `engines` adapts each.
_not_imported = {"vllm", "sglang", "flashinfer", "cutlass"}
_this = sys.modules[__name__]


def note_memory(**amounts):
    """Notes how an engine divides the memory. Engines may be killed."""
    _engine.update(amounts)
    _write_statistics(sys.modules["torch"])


def note_unchanged(engine, part):
    """Notes a part of an engine that another version lacks."""
    unchanged = _engines[engine.NAME]["unchanged"]
    if part not in unchanged:
        unchanged.append(part)


class NoKernels:
    """Compiled code whose functions do nothing, as all kernels."""

    def __call__(self, *args, **kwargs):
        pass

    def plan(self, *args, **kwargs):
        """FlashInfer keeps what this returns, and requires it before `run`."""
        return []

    def __getattr__(self, name):
        return self


def _adapt_engine(name):
    """Adapts an inference engine to the simulated GPU, before its package is imported."""
    if name in _not_imported:
        _not_imported.discard(name)
        _adapt(_own_module(os.path.join("engines", name)))


def _adapt(engine):
    """Changes the modules of an engine after their execution, and notes its version and the modules that lack a part to change."""

    def change_and_note(name, change):
        def then(module):
            if engine.NAME not in _engines:
                from importlib import metadata

                try:
                    version = metadata.version(engine.DISTRIBUTION)
                except metadata.PackageNotFoundError:
                    version = None
                _engines[engine.NAME] = {"name": engine.NAME, "version": version, "tested": engine.TESTED, "unchanged": []}
            try:
                change(module)
            except AttributeError:
                note_unchanged(engine, name)

        return then

    engine.hook = _this
    for name, change in {**engine.MODULES, **(engine.MODULES_WITH_VALUES if _IS_CPU else {})}.items():
        _guard.on_import(name, change_and_note(name, change))


def _if_known(change):
    """Leaves a module of another version, which lacks the parts to change, as it is."""

    def then(module):
        try:
            change(module)
        except AttributeError:
            pass

    return then


_ENDS = {
    "multiprocessing.util": _note_ends_of_processes,
    "threading": _note_errors_of_threads,
    "_pytest.runner": _if_known(_note_failed_tests),
    "unittest.result": _note_failed_cases,
}


def _note_path(kind, name, is_written=lambda *args, **named: True):
    """Makes a function or method note the file that its first argument names, if it is not a buffer. Another version may lack it."""
    if not hasattr(kind, name):
        return

    def note(*args, **named):
        path = next((value for value in (*args[:2], *map(named.get, ("filename", "file_name"))) if isinstance(value, (str, os.PathLike))), None)
        if path is not None and is_written(*args, **named):
            _effects.note_write(path)

    _guard.before(kind, name, note)


def _note_files_of_torch(module):
    """Notes the files that torch writes without Python: those of `torch.save`, `torch.export.save` and `torch.jit.save`, and those for its interpreter on
    phones."""
    import torch

    for kind, name in (("PyTorchFileWriter", "__init__"), ("ScriptModule", "save"), ("ScriptFunction", "save"), ("ScriptModule", "_save_for_mobile")):
        _note_path(getattr(torch._C, kind), name)
    for name in ("_save_jit_module", "_save_mobile_module"):
        _note_path(torch._C, name)


def _note_traces_and_shared_files(module):
    """Notes traces of the profiler, and files in which tensors are stored."""
    import torch

    def is_shared(filename=None, shared=False, *args, **named):
        return shared

    _note_path(torch._C._autograd._ProfilerResult, "save")
    _note_path(module.profiler, "_add_execution_trace_observer")
    _note_path(torch, "from_file", is_shared)
    _note_path(torch.UntypedStorage, "from_file", is_shared)
    _guard.replace(torch.UntypedStorage, "from_file", staticmethod(torch.UntypedStorage.from_file))


def _note_stores(module):
    """Notes the files through which ranks meet."""
    _note_path(module.FileStore, "__init__")


def _note_files_of_safetensors(module):
    read = module.safe_open

    def note_and_read(read, filename, *args, **kwargs):
        _effects.note_read(filename)
        return read(filename, *args, **kwargs)

    def note(*args, **kwargs):
        filename = kwargs.get("filename", args[1] if len(args) > 1 else None)
        if filename is not None:
            _effects.note_write(filename)

    class Kind(type):
        def __instancecheck__(cls, value):
            return isinstance(value, read)

        def __getattr__(cls, name):
            return getattr(read, name)

    class safe_open(metaclass=Kind):
        __doc__ = read.__doc__

        def __new__(cls, *args, **kwargs):
            return reading(*args, **kwargs)

    reading = _guard.around(read, note_and_read)
    _guard.before(module, "serialize_file", note)
    _guard.replace(module, "safe_open", safe_open)


_WRITERS = {
    "torch.serialization": _note_files_of_torch,
    "torch.profiler": _note_traces_and_shared_files,
    "torch.distributed.rendezvous": _note_stores,
    "safetensors": _note_files_of_safetensors,
}


# Frameworks that use the GPU without torch.
_OTHER_FRAMEWORKS = ("cupy", "jax", "numba.cuda", "tensorflow")


def _mark(*frameworks):
    """Shows that the hook runs in this process, which process started it, and the frameworks that it has imported."""
    text = " ".join((str(os.getppid()), *frameworks))
    try:
        _write("python-%d" % os.getpid(), lambda path: _write_text(path, text))
    except OSError:
        pass  # A full disk, or another user: the program must not notice.


def _write_stacks_on_signal():
    """Makes a signal, which the simulated GPU raises in a collective that waits, write the stacks of all threads, also without the interpreter's lock."""
    import faulthandler
    import signal

    file = os.open(os.path.join(_RUN, "stacks-%d" % os.getpid()), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    faulthandler.register(signal.SIGRTMIN + _STACK_SIGNAL, file, all_threads=True)


def _note_rank(rank, size, port):
    _write("rank-%d" % os.getpid(), lambda path: _write_text(path, "%s %s %s" % (rank, size, port)))


def _write_text(path, text):
    with open(path, "w") as file:
        file.write(text)


def _note_rank_of_launcher():
    """Notes the rank that a launcher gave to this process. Its children inherit the variable, but are no ranks."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and _IS_OF_RANK not in os.environ:
        os.environ[_IS_OF_RANK] = "1"
        _note_rank(rank, size, os.environ.get("MASTER_PORT", ""))


def _note_ranks_of_program(module):
    """Notes the rank that a program passes to `init_process_group`, or has in its environment by then."""

    def init_process_group(earlier, *given, **named):
        def of_call(name, at, variable=None):
            value = named.get(name, given[at] if len(given) > at else None)
            return os.environ.get(variable, "") if variable and value in (None, -1) else value

        rank, size, address = of_call("rank", 4, "RANK"), of_call("world_size", 3, "WORLD_SIZE"), of_call("init_method", 1) or "env://"
        if str(rank).isdecimal() and str(size).isdecimal():
            _note_rank(rank, size, os.environ.get("MASTER_PORT", "") if address == "env://" else address.rpartition(":")[2])
        return earlier(*given, **named)

    _guard.wrap(module, "init_process_group", init_process_group)


def _copy_objects_alone(module):
    """Lets ranks that exchange objects copy only the bytes of each object to the host. Torch also copies the padding after it, which nothing computes, and
    drops it there."""

    def read_alone(read, tensor, tensor_size, *rest, **named):
        size = int(tensor_size)
        return read(tensor[:size], size, *rest, **named)

    _guard.wrap(module, "_tensor_to_object", read_alone)


def _change_ranks(module):
    _note_ranks_of_program(module)
    if _IS_COPIES:
        _if_known(_copy_objects_alone)(module)


def _run_hidden_sitecustomize():
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


def _begin_hook():
    global _counters, _libraries, _effects, _saved, _copies
    _counters, _libraries = _own_module("counters"), _own_module("libraries")
    _guard.begin(_core())
    _mark()
    for function in (_mark, _forget_libraries, _host_peaks.clear):
        _guard.at_fork(function)
    _guard.at_exit(lambda: _without_space(_at_exit))
    _guard.at_exit(_note_modules)
    _write_at_abrupt_ends()
    _note_exits()
    for name, change in _ENDS.items():
        if name in sys.modules:
            change(sys.modules[name])
        else:
            _guard.on_import(name, change)
    has_devices = '"devices":1,' not in os.environ.get("HARNESS_GPU", '"devices":1,')
    if has_devices or _SHARES_MEMORY:
        _write_stacks_on_signal()
        _guard.at_fork(_write_stacks_on_signal)
    if _SHARES_MEMORY:
        _guard.on_import("psutil", _with_memory_of_machine)
    if has_devices:
        _note_rank_of_launcher()
        _guard.on_import("torch.distributed.distributed_c10d", _change_ranks)
    if _IS_COPIES or os.environ.get("HARNESS_GPU_COPIES"):
        _effects, _saved = _own_module("effects"), _own_module("saved")
        _effects.begin()
        _follow_saved()
        for name, change in _WRITERS.items():
            _guard.on_import(name, _if_known(change))
    for library in _libraries.LIBRARIES:
        _guard.on_import(library.MODULE, _note_library)
    for name, change in _libraries.KEEPERS_OF_PEAKS.items():
        _guard.on_import(name, _if_known(change))
    _copies = _own_module("copies") if os.environ.get("HARNESS_GPU_COPIES") else None
    _guard.on_import("torch.cuda", _with_cuda)
    if "HARNESS_GPU" in os.environ:
        _guard.on_import("jax._src.hardware_utils", _libraries.with_device_files)
        for name in _libraries.RUNTIME_BINDINGS:
            _guard.on_import(name, _if_known(_libraries.with_simulated_runtime))
        _guard.before_import(_adapt_engine)
    if _IS_CPU:
        _guard.on_import("torch", _compute_values)
        _guard.on_import("triton.testing", _without_values_in_triton)
        _guard.on_import("torch._inductor.runtime.benchmarking", _without_values_in_inductor)


# The hidden sitecustomize may be the hook of an outer `harness exec`: only the innermost hook acts.
if _RUN and not hasattr(sys, "_harness_hook"):
    sys._harness_hook = True
    _require_library()
    _guard = _own_module("guard")
    _guard.entry(_begin_hook)()
_run_hidden_sitecustomize()
