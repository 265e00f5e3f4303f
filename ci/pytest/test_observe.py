"""Tests of harness.observe, which writes a snapshot of each out-of-memory error."""
import os
import re
import signal
import subprocess
import sys
import time
import zlib

import pytest

PROGRAM = """
import importlib.util
assert importlib.util.find_spec("torch")
import torch
for attempt in range(3):
    try:
        kept = [torch.zeros(200 << 20, device="cuda") for _ in range(5)]
    except torch.OutOfMemoryError:
        print("out of memory", attempt)
"""


def run(folder, program, command=(), check=True, **variables):
    (folder / "program.py").write_text(program)
    python = ["harness", "exec", "--memory", "2GiB", "--", sys.executable, *command, "program.py"]
    settings = {"HARNESS_OBSERVE": "1", "HARNESS_OBSERVE_DIR": "snapshots", **variables}
    return subprocess.run(python, cwd=folder, env={**os.environ, **settings}, text=True, capture_output=True, check=check)


@pytest.mark.parametrize("command, variable", [(["-m", "harness.observe"], "0"), ([], "1")], ids=["module", "variable"])
def test_the_last_errors_leave_snapshots_named_by_job_and_rank(tmp_path, command, variable):
    settings = {"HARNESS_OBSERVE_KEEP": "2", "TORCHELASTIC_RUN_ID": "job/7" * 60, "RANK": "3", "TORCHELASTIC_RESTART_COUNT": "1"}
    result = run(tmp_path, PROGRAM, command, HARNESS_OBSERVE=variable, **settings)
    assert result.stdout == "out of memory 0\nout of memory 1\nout of memory 2\n"
    names = sorted(os.listdir(tmp_path / "snapshots"))
    job = "job_7" * 24 + "_%08x" % zlib.crc32(settings["TORCHELASTIC_RUN_ID"].encode())
    assert [re.sub(r"-\d{8}-\d{6}-\d+-", "-", name) for name in names] == [f"{job}-rank3-gpu0-restart1-{number}.pickle" for number in (2, 3)]
    explained = subprocess.run(["harness", "explain", tmp_path / "snapshots" / names[-1]], text=True, capture_output=True, check=True).stdout
    assert "The program is too large by 352 MiB" in explained and "program.py:7" in explained


# Each case makes one error and checks what it leaves.
CASES = """
import builtins, glob, io, os, shutil, signal, sys, threading, time
import torch
folder = os.environ["HARNESS_OBSERVE_DIR"]

def out_of_memory():
    try:
        torch.zeros(3 << 30, device="cuda")
    except torch.OutOfMemoryError:
        return
    raise AssertionError("no error")

def written():
    names = sorted(os.listdir(folder), key=lambda name: int(name.rsplit("-", 1)[-1].split(".")[0]))
    assert all(name.endswith(".pickle") for name in names), names
    return names

out_of_memory()
real = sys.stderr
closed = io.TextIOWrapper(io.BytesIO())
closed.close()
class Broken:
    def write(self, text): raise BrokenPipeError
    flush = fileno = write
reading, writing = os.pipe()
os.close(reading)
for stream in (None, closed, Broken(), object(), os.fdopen(writing, "w")):
    sys.stderr = stream
    out_of_memory()
sys.stderr = real
assert len(written()) == 4

# The user removes a file, then the folder, then makes it a file.
os.remove(os.path.join(folder, written()[0]))
out_of_memory()
shutil.rmtree(folder)
out_of_memory()
assert len(written()) == 1
shutil.rmtree(folder)
open(folder, "w").close()
out_of_memory()
out_of_memory()
os.remove(folder)
out_of_memory()

# Threads.
threads = [threading.Thread(target=out_of_memory) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
numbers = [int(name.rsplit("-", 1)[1].split(".")[0]) for name in written()]
assert numbers == list(range(numbers[-1] - 3, numbers[-1] + 1)), numbers

# The program replaces functions, and its tensors have code.
class Tensor(torch.nn.Parameter):
    @classmethod
    def __torch_function__(cls, *arguments, **keywords):
        os._exit(7)
class Module(torch.nn.Module):
    def __getattribute__(self, name): os._exit(8)
module = object.__new__(Module)
object.__getattribute__(module, "__dict__")["_parameters"] = {"weight": torch.ones(2, device="cuda").as_subclass(Tensor)}
functions = builtins.open, os.replace, os.makedirs, os.remove, io.open
def wrong(*_, **__): os._exit(9)
builtins.open = os.replace = os.makedirs = os.remove = io.open = wrong
last = written()[-1]
out_of_memory()
builtins.open, os.replace, os.makedirs, os.remove, io.open = functions
assert written()[-1] != last

# An observer that runs out of memory itself, and one frame below the limit of recursion.
import harness.observe as observe
observer = torch._harness_observer
snapshot = observer.snapshot
def recursive(device):
    observer.write(device)
    out_of_memory()
    return snapshot(device)
observer.snapshot = recursive
last = written()[-1]
out_of_memory()
assert written()[-1] != last
observer.snapshot = snapshot
def deep(depth): return deep(depth - 1) if depth else out_of_memory()
for depth in range(1, 12):
    sys.setrecursionlimit(len(__import__("inspect").stack()) + 2 + depth + 11)
    try: deep(depth)
    except RecursionError: pass
    finally: sys.setrecursionlimit(1000)

# A signal handler's error goes to the program, after the file is complete.
class Late(Exception): pass
def late(*_): raise Late
signal.signal(signal.SIGALRM, late)
def slow(device):
    time.sleep(0.3)
    return snapshot(device)
observer.snapshot = slow
last = written()[-1]
signal.setitimer(signal.ITIMER_REAL, 0.1)
try: torch.zeros(3 << 30, device="cuda")
except Late: print("interrupted")
assert written()[-1] != last
"""


def test_a_job_name_neither_hides_its_file_nor_leaves_the_folder(tmp_path):
    program = """
import os
import torch
for job in ("../../x/y", "x/y", "x_y", "..", "-rf"):
    os.environ["TORCHELASTIC_RUN_ID"] = job
    try:
        torch.zeros(1 << 40, device="cuda")
    except torch.OutOfMemoryError:
        pass
"""
    run(tmp_path, program, HARNESS_OBSERVE_KEEP="5")
    names = sorted(os.listdir(tmp_path / "snapshots"))
    jobs = [name.partition("-rank0")[0] for name in names]
    assert len(set(jobs)) == 5 and "x_y" in jobs, jobs
    assert sorted(job.partition("_")[0] for job in jobs) == ["job", "rf", "x", "x", "x"], jobs



def test_a_program_gets_its_error_whatever_happens_to_the_snapshot(tmp_path):
    wrong = {"HARNESS_OBSERVE_KEEP": "0", "HARNESS_OBSERVE_EVENTS": "-5"}
    result = run(tmp_path, CASES, HARNESS_OBSERVE_DIR=str(tmp_path / "snap shots"), check=False, **wrong)
    assert (result.returncode, result.stdout) == (0, "interrupted\n"), result.stderr
    assert "HARNESS_OBSERVE_KEEP is `0`, but must be a whole number from 1: using 4" in result.stderr
    assert "HARNESS_OBSERVE_EVENTS is `-5`, but must be a whole number from 1: using 100000" in result.stderr
    assert result.stderr.count("no snapshot: [Errno 17] File exists") == 1
    assert "see `harness explain '" in result.stderr


KILLED = """
import os, signal, torch
from harness import observe
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["KILLED"] == "1":
    observe.pickle.dump = kill
elif os.environ["KILLED"] == "full":
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    torch.zeros(3 << 30, device="cuda")
except torch.OutOfMemoryError:
    print("out of memory")
"""


def test_a_killed_process_leaves_a_file_that_the_next_one_removes_and_a_full_disk_none(tmp_path):
    variables = {"HARNESS_OBSERVE": "0", "HARNESS_OBSERVE_EVENTS": "9" * 30}
    (tmp_path / "snapshots").mkdir()
    others = tmp_path / "snapshots" / "other.pickle.unfinished"
    others.write_text("of another program")
    assert run(tmp_path, KILLED, check=False, KILLED="1", **variables).returncode == 128 + signal.SIGKILL
    assert [name for name in os.listdir(tmp_path / "snapshots") if name.endswith("-1.pickle.unfinished")]
    result = run(tmp_path, KILLED, KILLED="full", **variables)
    assert result.stdout == "out of memory\n" and "no snapshot: " in result.stderr
    assert os.listdir(tmp_path / "snapshots") == [others.name]


# Fails each call that the observer makes, by a profiler that raises an error.
FAILING = """
import gc, sys, threading, types, _thread
import torch
from harness import observe

model = torch.nn.Linear(4, 4).cuda()
model(torch.ones(2, 4, device="cuda")).sum().backward()
optimizer = torch.optim.Adam(model.parameters())
optimizer.step()
observe.gc = types.SimpleNamespace(get_objects=lambda: [model, optimizer, 1])
seen, wanted, error, failed, main = [], 0, None, None, threading.get_ident()

def profile(frame, event, argument):
    global failed
    caller = frame if event == "c_call" else frame.f_back
    if event not in ("call", "c_call") or caller is None or caller.f_code.co_filename != observe.__file__:
        return
    call = (caller.f_code.co_name, caller.f_lineno, argument.__name__ if event == "c_call" else frame.f_code.co_name)
    # Locks do not fail. In the main thread, only the program's signal handlers raise these.
    if call in seen or call[2] in ("__exit__", "acquire", "release") or threading.get_ident() == main and not issubclass(error, Exception):
        return
    seen.append(call)
    if len(seen) == wanted:
        failed = call
        raise error("injected")

def start(work, arguments):
    def profiled():
        sys.setprofile(profile)
        work(*arguments)
    _thread.start_new_thread(profiled, ())

observe.start_new_thread = start
total = 0
for error in (OSError, RecursionError, SystemExit, KeyboardInterrupt):
    wanted, failed = 0, "nothing yet"
    while failed:
        seen, wanted, failed = [], wanted + 1, None
        sys.setprofile(profile)
        try:
            torch.zeros(3 << 30, device="cuda")
        except torch.OutOfMemoryError:
            pass
        finally:
            sys.setprofile(None)
        total += failed is not None
print(total)
"""


def test_no_failed_call_of_the_observer_reaches_the_program(tmp_path):
    result = run(tmp_path, FAILING, HARNESS_OBSERVE="0", check=False)
    assert result.returncode == 0 and int(result.stdout) > 150, result.stderr
