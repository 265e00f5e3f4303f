"""Tests of `--gpu-memory`, which measures each test of a suite, and of `--gpu-memory-limit`, with which tests share a GPU."""
import json
import threading
import time

import pytest
from _gpu_oom_harness import suite

pytest_plugins = "pytester"

TESTS = """
import os, pytest, torch

left = []
mib = lambda count: torch.zeros(count << 20, dtype=torch.uint8, device="cuda")

@pytest.fixture(scope="module")
def weights():
    return mib(64)

def test_without_a_gpu():
    assert torch.ones(3).sum() == 3

@pytest.mark.parametrize("size", [20, 100])
def test_of(size):
    mib(size)

def test_with_weights(weights):
    pass

def test_with_the_same_weights(weights):
    pass

def test_that_leaves_memory():
    left.append(mib(30))

def test_of_cycles():
    cycle = [mib(200)]
    cycle.append(cycle)

def test_that_reads_a_value():
    assert mib(4).sum().item() == 0

def test_that_fails():
    assert mib(2) is None

@pytest.mark.skip
def test_that_is_skipped():
    pass
"""
OPTIONS = "-p", "no:cacheprovider"
MIB = 1 << 20


def test_a_measured_suite_has_a_row_for_each_test(pytester):
    pytester.makepyfile(test_memory=TESTS)
    result = pytester.runpytest_subprocess(*OPTIONS, "--gpu-memory", "--gpu-memory-options=--memory 2GiB")
    result.stdout.fnmatch_lines_random([
        "GPU memory of 10 tests, in gpu-memory.json:",
        "*294.00 MiB  200.00 MiB  test_memory.py::test_of_cycles",
        "*test_memory.py::test_that_reads_a_value (or another size: see the values below)",
        "30.00 MiB stay in use after test_memory.py::test_that_leaves_memory",
        "2 tests used no GPU.",
        "1 test failed.",
        "2 tests read values that nothing computed. --gpu-memory-options='--values cpu' computes those of torch.",
    ])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    data = json.loads((pytester.path / "gpu-memory.json").read_text())
    assert (data["version"], data["options"]) == (1, "--memory 2GiB")
    rows = {name.removeprefix("test_memory.py::"): row for name, row in data["tests"].items()}
    assert rows["test_of[100]"]["peak"] == 100 * MIB and rows["test_of[20]"]["peak"] == 20 * MIB
    # The second one may run without the first one.
    assert rows["test_with_the_same_weights"]["uses_gpu"] and rows["test_with_the_same_weights"]["peak"] == 64 * MIB
    assert [name for name, row in rows.items() if row["leaves"]] == ["test_that_leaves_memory"]
    assert rows["test_that_is_skipped"]["outcome"] == "skipped"


def test_a_test_that_ends_the_process_loses_no_other(pytester):
    pytester.makepyfile("import os\n" + "\n".join(f"def test_{name}(): {body}" for name, body in (("a", "pass"), ("b", "os._exit(0)"), ("c", "pass"))))
    result = pytester.runpytest_subprocess(*OPTIONS, "--gpu-memory")
    result.stdout.fnmatch_lines_random(["GPU memory of 3 tests, in gpu-memory.json:", "1 test ended the process: the memory is unknown."])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_worker_of_xdist_measures_its_own_tests(pytester):
    """Each test waits for the other one to run beside it."""
    test = """
    import pathlib, time
    def meet(own, other):
        pathlib.Path(r"{folder}", own).touch()
        begun = time.monotonic()
        while not pathlib.Path(r"{folder}", other).exists():
            assert time.monotonic() < begun + 300, "waited 300 s for the other test"
            time.sleep(0.01)
    def test_{own}():
        import torch
        meet("{own}", "{other}")
        {use}
        meet("end of {own}", "end of {other}")
    """
    notes = pytester.mkdir("notes")
    use = "torch.zeros(100 << 20, dtype=torch.uint8, device='cuda')"
    pytester.makepyfile(
        test_a=test.format(own="a", other="b", use="pass", folder=notes), test_b=test.format(own="b", other="a", use=use, folder=notes)
    )
    assert pytester.runpytest_subprocess(*OPTIONS, "--gpu-memory", "-n2").ret == 0
    rows = json.loads((pytester.path / "gpu-memory.json").read_text())["tests"]
    assert [(row["peak"], row["uses_gpu"]) for row in rows.values()] == [(0, False), (100 * MIB, True)]


SERVER = """
import multiprocessing, pytest

def serve(requests):
    import torch
    held = []
    for size in iter(requests.recv, None):
        held.append(torch.zeros(size << 20, dtype=torch.uint8, device="cuda"))
        requests.send(True)

@pytest.fixture(scope="module")
def server():
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=serve, args=(its,))
    process.start()
    yield ours
    ours.send(None)
    process.join()

def grow(server, size):
    server.send(size)
    assert server.recv()

def test_starts(server):
    grow(server, 20)

def test_grows(server):
    grow(server, 300)
"""


def test_memory_of_a_process_that_an_earlier_test_has_started_counts(pytester):
    pytester.makepyfile(test_server=SERVER)
    assert pytester.runpytest_subprocess(*OPTIONS, "--gpu-memory").ret == 0
    rows = json.loads((pytester.path / "gpu-memory.json").read_text())["tests"]
    assert {name.rpartition("::")[2]: (row["peak"], row["uses_gpu"]) for name, row in rows.items()} == {
        "test_starts": (20 * MIB, True), "test_grows": (320 * MIB, True),
    }


# Stands for JAX, whose allocator publishes statistics and keeps its memory, unless it requests each array from the driver.
JAX = {
    "__init__": """
import ctypes, os
used = False
class Device:
    platform, local_hardware_id = "gpu", 0
    def memory_stats(self):
        return None if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform" else {"bytes_in_use": 64 << 20}
def local_devices():
    return [Device()]
def ones():
    global used
    used = True
    assert ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(64 << 20)) == 0
""",
    "_src/__init__": "",
    "_src/xla_bridge": "import jax\ndef backends_are_initialized(): return jax.used\ndef backends(): return {'cuda': jax}",
}


@pytest.mark.parametrize("allocator", ["default", "platform"])
def test_the_memory_that_a_library_keeps_is_not_that_of_a_test(pytester, monkeypatch, allocator):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", allocator)
    pytester.makepyfile(**{f"jax/{name}": text for name, text in JAX.items()}, test_jax="import jax\ndef test_ones(): jax.ones()")
    result = pytester.runpytest_subprocess(*OPTIONS, "--gpu-memory")
    keeps = [
        "   64.00 MiB     unknown  test_jax.py::test_ones (includes what JAX keeps: see below)",
        "1 test ran next to memory that JAX keeps until the process ends. XLA_PYTHON_CLIENT_ALLOCATOR=platform pytest --gpu-memory measures each test.",
    ]
    own = ["   64.00 MiB   64.00 MiB  test_jax.py::test_ones", "64.00 MiB stay in use after test_jax.py::test_ones"]
    shown, missing = (keeps, own) if allocator == "default" else (own, keeps)
    for line in shown:
        assert line in result.outlines
    for line in missing:
        assert line not in result.outlines


# JAX as TensorFlow imports it if it is installed: without using the GPU.
UNUSED_JAX = {"__init__": "", "_src/__init__": "", "_src/xla_bridge": "def backends_are_initialized(): return False"}
# Stands for TensorFlow, which reserves memory once and counts the bytes of its tensors.
TENSORFLOW = {
    "__init__": """
import ctypes
import jax
from . import config
from .python.eager import context
def ones(mib):
    if not context.opened._initialized:
        context.opened._initialized = True
        assert ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(512 << 20)) == 0
    context.opened.grow(mib << 20)
def free(mib):
    context.opened.grow(-(mib << 20))
""",
    "config/__init__": """
import types
from . import experimental
def list_logical_devices(kind):
    return [types.SimpleNamespace(name="/device:GPU:0")]
""",
    "config/experimental": """
from ..python.eager import context
get_memory_info = lambda name: context.opened.get_memory_info(name)
reset_memory_stats = lambda name: context.opened.reset_memory_stats(name)
""",
    "python/__init__": "",
    "python/eager/__init__": "",
    "python/eager/context": """
class Context:
    _initialized, current, peak = False, 0, 0
    def grow(self, size):
        self.current += size
        self.peak = max(self.peak, self.current)
    def get_memory_info(self, name):
        return {"current": self.current, "peak": self.peak}
    def reset_memory_stats(self, name):
        self.peak = self.current
opened = Context()
context = lambda: opened
""",
}
OF_TENSORFLOW = """
import tensorflow
def test_large(): tensorflow.ones(200); tensorflow.free(150)
def test_small(): tensorflow.ones(30); tensorflow.free(30)
"""


def test_a_library_that_counts_its_tensors_has_a_figure_for_each_test(pytester):
    pytester.makepyfile(**{f"jax/{name}": text for name, text in UNUSED_JAX.items()})
    pytester.makepyfile(**{f"tensorflow/{name}": text for name, text in TENSORFLOW.items()}, test_tensorflow=OF_TENSORFLOW)
    result = pytester.runpytest_subprocess(*OPTIONS, "--gpu-memory", "--gpu-memory-options=--record record.json")
    for name, own in (("large", 200), ("small", 30)):
        assert f"  512.00 MiB  {own:6.2f} MiB  test_tensorflow.py::test_{name} (includes what TensorFlow keeps: see below)" in result.outlines
    # The record has the peak of the whole process.
    processes = json.loads((pytester.path / "record.json").read_text())["processes"]
    stats = [process["torch"]["memory_stats"] for process in processes if process["torch"]]
    assert [of["0"]["allocated_bytes.all.peak"] for of in stats] == [200 * MIB]


def test_tests_that_do_not_run_keep_their_rows(pytester):
    pytester.makepyfile("def test_one(): pass\ndef test_two(): pass")
    for arguments, count in ((["-k", "one"], 1), (["-k", "two"], 2), (["-k", "two", "--gpu-memory-options=--memory 1GiB"], 1)):
        pytester.runpytest_subprocess(*OPTIONS, "--gpu-memory", *arguments).stdout.fnmatch_lines_random(["GPU memory of 1 test, *"])
        assert len(json.loads((pytester.path / "gpu-memory.json").read_text())["tests"]) == count


def test_the_file_of_a_repository_chooses_the_values(pytester):
    (pytester.path / ".harness.yml").write_text("values: cpu\n")
    pytester.makepyfile("import torch\ndef test_sums(): assert torch.ones(1 << 20, device='cuda').sum().item() == 1 << 20")
    pytester.runpytest_subprocess(*OPTIONS, "--gpu-memory").assert_outcomes(passed=1)


# A test keeps its memory until another one runs beside it, or after a while.
SHARING = """
import os, pathlib, pytest, time, torch

@pytest.mark.parametrize("number", range(6))
def test_beside_others(number):
    folder = pathlib.Path(os.environ["NOTES"])
    held = torch.zeros(300 << 20, dtype=torch.uint8, device="cuda")
    note = folder / f"runs-{number}"
    note.touch()
    most, begun = 0, time.monotonic()
    while time.monotonic() < begun + float(os.environ["SECONDS_BESIDE"]):
        most = max(most, len(list(folder.glob("runs-*"))))
        time.sleep(0.01)
    (folder / f"most-{number}").write_text(str(most))
    note.unlink()
"""


@pytest.mark.parametrize("workers", ["3", "auto"])
def test_tests_wait_until_the_memory_is_enough_for_all_that_run(pytester, monkeypatch, workers):
    """Of three workers, two can have 200 MiB for a context and 300 MiB for a test; the third holds its context at most."""
    monkeypatch.setenv("NOTES", str(pytester.mkdir("notes")))
    monkeypatch.setenv("SECONDS_BESIDE", "0")
    pytester.makepyfile(SHARING)
    pytester.runpytest_subprocess(*OPTIONS, "--gpu-memory").assert_outcomes(passed=6)
    monkeypatch.setenv("SECONDS_BESIDE", "1")
    sharing = f"-n{workers}", "--gpu-memory-limit=1200MiB", "--gpu-memory-context=200MiB"
    on_a_gpu = "harness", "exec", "--memory=1200MiB", "--context-overhead=200MiB"
    pytester.run(*on_a_gpu, "--", "python", "-m", "pytest", *OPTIONS, *sharing).assert_outcomes(passed=6)
    assert max(int(file.read_text()) for file in (pytester.path / "notes").glob("most-*")) <= 2


def test_the_number_of_workers_leaves_memory_for_the_largest_test(pytester):
    pytester.makepyfile("def test_a(): pass")
    row = {"outcome": "passed", "seconds": 1, "start": 0, "peak": 700 * MIB, "uses_gpu": True, "reads": 0, "leaves": 0}
    for peak, workers in ((700, 1), (0, 1), (100, 1)):
        tests = {"test_a": {**row, "peak": peak * MIB}}
        (pytester.path / "gpu-memory.json").write_text(json.dumps({"version": 1, "options": "", "tests": tests}))
        result = pytester.runpytest_subprocess(*OPTIONS, "-nauto", "--gpu-memory-limit=1600MiB")
        result.stdout.fnmatch_lines_random([f"*{workers}/{workers} worker*"])
        assert result.ret == 0


def test_a_worker_that_ends_in_a_test_gives_its_memory_back(pytester):
    pytester.makepyfile("import os\ndef test_a(): pass\ndef test_b(): os._exit(1)\ndef test_c(): pass\ndef test_d(): pass")
    row = {"outcome": "passed", "seconds": 1, "start": 0, "peak": 900 * MIB, "uses_gpu": True, "reads": 0, "leaves": 0}
    name = "test_a_worker_that_ends_in_a_test_gives_its_memory_back.py::test_"
    tests = {name + letter: row for letter in "abcd"}
    (pytester.path / "gpu-memory.json").write_text(json.dumps({"version": 1, "options": "", "tests": tests}))
    result = pytester.runpytest_subprocess(*OPTIONS, "-n2", "--gpu-memory-limit=1GiB", "--gpu-memory-context=10MiB")
    result.assert_outcomes(passed=3, failed=1)


def test_no_context_is_reserved_twice(pytester):
    """The second test of a process whose context exists already needs no second one."""
    plan = suite.Plan.__new__(suite.Plan)
    plan.limit, plan.context = 1000, 100
    plan.tests = {"test": {"start": 0, "peak": 500}}
    plan.needs = {"test": 500}
    assert [plan.wanted("test", kept) for kept in (0, 100, 150)] == [600, 600, 650]


def wait_until(is_so, what):
    begun = time.monotonic()
    while not is_so():
        assert time.monotonic() < begun + 300, f"waited 300 s until {what}"
        time.sleep(0.01)


def waiting_in(shared):
    with shared.state() as state:
        return len(state["waiting"])


def test_memory_goes_to_the_first_who_waits(tmp_path):
    """Three processes that live, and one that has ended."""
    path = tmp_path / "shared"
    holds, large, small = (suite.Shared(path, 10) for _ in range(3))
    holds.pid, large.pid, small.pid = "1", str(threading.get_native_id()), "self"
    path.write_text(json.dumps({"used": {"0": 9}, "running": ["0"], "waiting": ["0"]}))
    holds.acquire(6)
    order = []
    takes = lambda shared, wanted: threading.Thread(target=lambda: (shared.acquire(wanted), order.append(shared.pid)))
    waiting = [takes(large, 8), takes(small, 1)]
    for number, thread in enumerate(waiting):
        thread.start()
        wait_until(lambda: waiting_in(holds) > number, "a thread waits for memory")
    assert not order
    holds.release(0)
    for thread in waiting:
        thread.join()
    assert order == [large.pid, small.pid]


def test_what_no_memory_can_hold_runs_alone(tmp_path):
    shared = suite.Shared(tmp_path / "shared", 10)
    shared.acquire(11)
    shared.release(11)


@pytest.mark.parametrize("arguments, text, message", [
    (["--gpu-memory-limit=1GiB"], None, "gpu-memory.json is missing: `pytest --gpu-memory` writes it"),
    (["--gpu-memory-limit=1GiB"], "{", "gpu-memory.json cannot be read: *"),
    (["--gpu-memory-limit=1GiB"], "[]", "gpu-memory.json cannot be read: *"),
    (["--gpu-memory-limit=1GiB"], '{"version": 1, "options": "", "tests": []}', "gpu-memory.json cannot be read: *"),
    (["--gpu-memory-limit=1GiB"], '{"version": 2, "suite": {}}', "gpu-memory.json has version 2, not 1: *"),
    (["--gpu-memory", "--gpu-memory-options=--memory 'x"], None, "--gpu-memory-options=--memory 'x: No closing quotation"),
    (["--gpu-memory", "--gpu-memory-file=no/such/file.json"], None, "--gpu-memory-file: no/such/file.json cannot be written"),
    (["--gpu-memory-limit=1GiB"], '{"version": 2}', "gpu-memory.json has version 2, not 1: *"),
    (["--gpu-memory-limit=1 apple"], '{"version": 1, "options": "", "tests": {}}', "--gpu-memory-limit='1 apple' is not a size: *"),
    (["--gpu-memory-limit=800MiB"], '{"version": 1, "options": "", "tests": {}}', "800.00 MiB is not more than --gpu-memory-context, 800.00 MiB"),
    (["--gpu-memory-limit=1GiB", "-n2"], '{"version": 1, "options": "", "tests": {}}', "1.00 GiB is too little for 2 workers, *: start at most 1, or `-n auto`"),
])
def test_bad_input_has_one_line(pytester, arguments, text, message):
    pytester.makepyfile("def test(): pass")
    if text is not None:
        (pytester.path / "gpu-memory.json").write_text(text)
    result = pytester.runpytest_subprocess(*OPTIONS, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines_random([f"*{message}"])
