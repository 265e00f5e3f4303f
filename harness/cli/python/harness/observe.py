"""Writes a memory snapshot whenever PyTorch runs out of GPU memory.

    python -m harness.observe train.py --batch 64     # around an unchanged program
    import harness.observe                            # in a program, before or after `import torch`
    HARNESS_OBSERVE=1 python train.py                 # also in the processes that it starts

Each fatal out-of-memory error writes a snapshot, whose name contains job, rank, time and number, for `harness explain`. Settings, from the environment:

    HARNESS_OBSERVE_DIR     the folder [default: the current folder]
    HARNESS_OBSERVE_KEEP    snapshots to keep per process: later ones replace the oldest [default: 4]
    HARNESS_OBSERVE_EVENTS  allocations and frees to remember [default: 100000]

The observer never fails the program: if it cannot work, it prints the reason once on standard error.
"""
import contextlib
import fcntl
import importlib.abc
import io
import os
import pickle
import re
import runpy
import shlex
import sys
import time
import zlib

# Bound here: a program may replace these functions in their modules.
from _thread import allocate_lock, get_ident, start_new_thread
from io import open
from os import makedirs, remove, replace

from _gpu_oom_harness import snapshot

reason = snapshot.reason

# The variables of launchers and schedulers, most specific first.
JOBS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "RAY_JOB_ID", "JOB_NAME", "HOSTNAME")
RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
UNFINISHED = ".unfinished"
IS_UNFINISHED = re.compile(r".*-rank[^/]*-gpu\d+-[^/]*\d{8}-\d{6}-\d+-\d+\.pickle\.unfinished")
# A file name has at most 255 bytes.
LONGEST_JOB, LONGEST_NUMBER = 120, 20
# In seconds. A slow file system, or an import that waits for one of the program's, must not stop the program.
LONGEST_WAIT, LONGEST_WAIT_INTERRUPTED = 300, 5


class Observer:
    def __init__(self, torch):
        self.torch = torch
        self.folder = os.path.abspath(os.environ.get("HARNESS_OBSERVE_DIR") or ".")
        self.kept = number("HARNESS_OBSERVE_KEEP", 4)
        self.events = number("HARNESS_OBSERVE_EVENTS", 100_000)
        self.written = []
        self.number = 0
        self.problems = set()
        self.turn = allocate_lock()
        self.writer = None

    def start(self):
        """Records the history of allocations with Python stacks, and waits for errors."""
        try:
            self.torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=self.events)
            self.torch._C._cuda_attach_out_of_memory_observer(self.write)
        except Exception as error:
            say(f"not observed: {reason(error)}")

    def write(self, device, *_):
        """Writes a snapshot in another thread, so only the program's own signal handlers can raise an error here, such as KeyboardInterrupt."""
        messages, ended = [], None
        try:
            if get_ident() == self.writer:
                return
            ended = allocate_lock()
            ended.acquire()
            start_new_thread(self.work, (device, messages, ended))
        except Exception:
            messages, ended = ["no snapshot: no further thread can start"], None
        if ended is not None:
            try:
                ended.acquire(timeout=LONGEST_WAIT)
            except BaseException:
                # Usually, the file becomes complete first.
                ended.acquire(timeout=LONGEST_WAIT_INTERRUPTED)
                raise
        try:
            for message in messages:
                say(message)
        except Exception:
            # Not even the call succeeds, because of the limit of recursions.
            pass

    def work(self, device, messages, ended):
        try:
            with self.turn:
                self.writer = get_ident()
                try:
                    path, problems = self.snapshot(device)
                    messages.append(f"out of memory on GPU {device}: see `harness explain {shlex.quote(path)}`")
                except BaseException as error:
                    problems = [f"no snapshot: {reason(error)}"]
                finally:
                    self.writer = None
                messages.extend(problem for problem in problems if problem not in self.problems)
                self.problems.update(problems)
        except BaseException:
            # Without memory of the host, not even the message exists.
            pass
        finally:
            ended.release()

    def snapshot(self, device):
        """Returns the path of a new snapshot, and the problems of writing it."""
        makedirs(self.folder, exist_ok=True)
        self.remove_unfinished()
        path, held = self.reserve(device)
        try:
            problems = dump(self.torch, path + UNFINISHED)
            replace(path + UNFINISHED, path)
        except BaseException:
            with contextlib.suppress(OSError):
                remove(path + UNFINISHED)
            raise
        finally:
            os.close(held)
        self.written.append(path)
        while len(self.written) > self.kept:
            try:
                with contextlib.suppress(FileNotFoundError):
                    remove(self.written.pop(0))
            except OSError as error:
                problems.append(f"an older snapshot stays: {reason(error)}")
        return path, problems

    def reserve(self, device):
        """Returns a path that no process uses, and a descriptor that holds the lock of its unfinished file."""
        while True:
            self.number += 1
            path = os.path.join(self.folder, self.name(device))
            try:
                held = os.open(path + UNFINISHED, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                continue
            # Another process may be removing the file, or have finished one of this name: containers share a process ID.
            if lock(held) is not False and os.fstat(held).st_nlink:
                if not os.path.lexists(path):
                    return path, held
                remove(path + UNFINISHED)
            os.close(held)

    def remove_unfinished(self):
        """Removes the unfinished files of processes that were killed, which hold no lock."""
        with contextlib.suppress(OSError):
            for name in filter(IS_UNFINISHED.fullmatch, os.listdir(self.folder)):
                with contextlib.suppress(OSError):
                    path = os.path.join(self.folder, name)
                    found = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
                    try:
                        if lock(found):
                            remove(path)
                    finally:
                        os.close(found)

    def name(self, device):
        moment = time.strftime("%Y%m%d-%H%M%S")
        restart = first(RESTARTS, "")[:LONGEST_NUMBER]
        restarts = [f"restart{restart}"] if restart else []
        rank = first(RANKS, "0")[:LONGEST_NUMBER]
        # A name that begins with a dot is hidden, and one that begins with a dash looks like an option.
        given = first(JOBS, "job")
        job = re.sub(r"[^A-Za-z0-9._-]", "_", given[:LONGEST_JOB].strip("./-")) or "job"
        if job != given:  # Jobs whose names differ in other characters have different files.
            job += "_%08x" % zlib.crc32(given.encode(errors="replace"))
        parts = [job, f"rank{rank}", f"gpu{device}", *restarts, moment, str(os.getpid()), str(self.number)]
        return re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(parts)) + ".pickle"


def lock(descriptor):
    """Locks a file until its descriptor is closed or its process ends. Returns whether it did, or None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


def dump(torch, path):
    """Writes a snapshot, and returns a list of problems."""
    taken, problems = snapshot.take(torch)
    with open(path, "wb") as file:
        pickle.dump(taken, file)
    return problems


def first(names, otherwise):
    # Launchers without a job name write `none`.
    return next((os.environ[name] for name in names if os.environ.get(name, "none") not in ("", "none")), otherwise)


def number(name, otherwise):
    text = os.environ.get(name) or str(otherwise)
    try:
        value = int(text)
    except ValueError:
        value = 0
    if 1 <= value <= sys.maxsize:
        return value
    say(f"{name} is `{text[:40]}`, but must be a whole number from 1: using {otherwise}")
    return otherwise


def say(message):
    """Prints a message, unless standard error is closed."""
    try:
        text = f"harness.observe: {message}\n".encode("utf-8", "backslashreplace")
        if type(sys.stderr) is io.TextIOWrapper:
            # If a pipe is broken, a buffer would keep the message, and Python would end with exit code 120.
            os.write(sys.stderr.fileno(), text)
        elif sys.stderr is not None:
            sys.stderr.write(text.decode())
            sys.stderr.flush()
    except Exception:
        pass


def observe(torch):
    """Observes as soon as the program uses the GPU. Processes without a GPU are left alone."""
    try:
        if not hasattr(torch, "_harness_observer"):
            torch._harness_observer = Observer(torch)
            torch.cuda._lazy_call(torch._harness_observer.start)
    except Exception as error:
        say(f"not observed: {reason(error)}")


class AfterImport(importlib.abc.MetaPathFinder):
    """Observes when the program imports torch. It stays, because many libraries look for torch before they import it."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        try:
            finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
            spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
            if spec is not None and spec.loader is not None:
                load = spec.loader.exec_module

                def load_and_observe(module):
                    load(module)
                    observe(module)

                spec.loader.exec_module = load_and_observe
            return spec
        except Exception:
            # The other finders are asked next, and report their own errors.
            return None


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m harness.observe PROGRAM.py [ARGUMENTS]…")
    if not os.path.exists(sys.argv[1]):
        sys.exit(f"harness.observe: there is no file `{sys.argv[1]}`; usage: python -m harness.observe PROGRAM.py [ARGUMENTS]…")
    import harness.observe  # noqa: F401 (under its own name, so that the program can import it too)

    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
elif "torch" in sys.modules:
    observe(sys.modules["torch"])
else:
    sys.meta_path.insert(0, AfterImport())
