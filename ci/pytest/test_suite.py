"""Tests of `--gpu-memory`, which measures each test of a suite, and of `--gpu-memory-limit`, with which tests share a GPU."""
import json
import threading

import pytest

from harness.suite import Shared

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
        "GPU memory of 10 tests, from gpu-memory.json:",
        "*294.00 MiB  200.00 MiB  test_memory.py::test_of_cycles",
        "30.00 MiB stay in use after test_memory.py::test_that_leaves_memory",
        "2 tests used no GPU.",
        "1 test failed.",
        "2 tests read values that nothing computed. --gpu-memory-options='--values cpu' computes them.",
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
    result.stdout.fnmatch_lines_random(["GPU memory of 3 tests, from gpu-memory.json:", "1 test ended the process: the memory is unknown."])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_tests_in_processes_of_xdist_are_measured_too(pytester):
    pytester.makepyfile(test_memory=TESTS)
    pytester.runpytest_subprocess(*OPTIONS, "--gpu-memory", "-n2").stdout.fnmatch_lines_random(["GPU memory of 10 tests, from gpu-memory.json:"])


# Each test notes how many others run.
SHARING = """
import os, pathlib, pytest, time, torch

@pytest.mark.parametrize("number", range(6))
def test_beside_others(number, tmp_path_factory):
    folder = pathlib.Path(os.environ["NOTES"])
    held = torch.zeros(300 << 20, dtype=torch.uint8, device="cuda")
    note = folder / f"runs-{number}"
    note.touch()
    (folder / f"count-{number}").write_text(str(len(list(folder.glob("runs-*")))))
    note.unlink()
"""


def test_tests_wait_until_the_memory_is_enough_for_all_that_run(pytester, monkeypatch):
    monkeypatch.setenv("NOTES", str(pytester.mkdir("notes")))
    pytester.makepyfile(SHARING)
    pytester.runpytest_subprocess(*OPTIONS, "--gpu-memory").assert_outcomes(passed=6)
    sharing = "-n3", "--gpu-memory-limit=700MiB", "--gpu-memory-context=0B"
    pytester.run("harness", "exec", "--memory=700MiB", "--", "python", "-m", "pytest", *OPTIONS, *sharing).assert_outcomes(passed=6)
    assert max(int(file.read_text()) for file in (pytester.path / "notes").glob("count-*")) <= 2


def test_memory_goes_to_the_first_who_waits(tmp_path):
    """Three processes that live, and one that has ended."""
    path = tmp_path / "shared"
    holds, large, small = (Shared(path, 10) for _ in range(3))
    holds.pid, large.pid, small.pid = "1", str(threading.get_native_id()), "self"
    path.write_text(json.dumps({"used": {"0": 9}, "running": ["0"], "waiting": ["0"]}))
    holds.acquire(6)
    order = []
    takes = lambda shared, wanted: threading.Thread(target=lambda: (shared.acquire(wanted), order.append(shared.pid)))
    waiting = [takes(large, 8), takes(small, 1)]
    for number, thread in enumerate(waiting):
        thread.start()
        while len(json.loads(path.read_text() or "{}").get("waiting", ())) <= number:
            pass
    assert not order
    holds.release(0)
    for thread in waiting:
        thread.join()
    assert order == [large.pid, small.pid]


def test_what_no_memory_can_hold_runs_alone(tmp_path):
    shared = Shared(tmp_path / "shared", 10)
    shared.acquire(11)
    shared.release(11)


@pytest.mark.parametrize("arguments, text, message", [
    (["--gpu-memory-limit=1GiB"], None, "gpu-memory.json is missing: `pytest --gpu-memory` writes it"),
    (["--gpu-memory-limit=1GiB"], "{", "gpu-memory.json cannot be read: *"),
    (["--gpu-memory-limit=1GiB"], "[]", "gpu-memory.json cannot be read: *"),
    (["--gpu-memory-limit=1GiB"], '{"version": 2, "tests": {}}', "gpu-memory.json has version 2, not 1: *"),
    (["--gpu-memory-limit=1 apple"], '{"version": 1, "tests": {}}', "--gpu-memory-limit='1 apple' is not a size: *"),
    (["--gpu-memory-limit=800MiB"], '{"version": 1, "tests": {}}', "800.00 MiB is not more than --gpu-memory-context, 800.00 MiB"),
    (["--gpu-memory-limit=1GiB", "-n2"], '{"version": 1, "tests": {}}', "1.00 GiB is too little for 2 workers, *: start at most 1, or `-n auto`"),
])
def test_bad_input_has_one_line(pytester, arguments, text, message):
    pytester.makepyfile("def test(): pass")
    if text is not None:
        (pytester.path / "gpu-memory.json").write_text(text)
    result = pytester.runpytest_subprocess(*OPTIONS, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines_random([f"*{message}"])
