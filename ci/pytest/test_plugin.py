"""Tests of the pytest plugin: what a failed test says."""
pytest_plugins = "pytester"

TESTS = """
import os, pytest

@pytest.mark.gpu_memory(memory="2GiB", max_allocated="1MiB")
def test_exceeds_its_limit():
    import torch
    torch.zeros(1 << 20, device="cuda")

@pytest.mark.gpu_memory(memory="2GiB")
def test_runs_out():
    import torch
    kept = [torch.zeros(200 << 20, device="cuda") for _ in range(5)]

@pytest.mark.gpu_memory(memory="2GiB", faults="all")
def test_does_not_recover():
    import torch
    torch.zeros(1 << 20, device="cuda")

@pytest.mark.gpu_memory(memory="2GiB")
def test_is_killed():
    os.kill(os.getpid(), 9)

@pytest.mark.gpu_memory(mem="2GiB")
def test_has_a_wrong_mark():
    pass
"""


def test_a_failed_test_says_why(pytester):
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=5)
    for line in (
        "peak allocated is 4.00 MiB (4194304 bytes), and max_allocated is 1.00 MiB (1048576 bytes)",
        "The program is too large by 352 MiB: *",
        "The program survives none of 1 injected failure; *",
        "signal 9 ended the program: *",
        "the mark gpu_memory has no argument `mem`: it takes gpu, *",
    ):
        result.stdout.fnmatch_lines_random(line)
