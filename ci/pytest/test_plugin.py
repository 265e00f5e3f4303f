"""Tests of the pytest plugin: what a failed test says, and that no child can make the run fail or pass in place of its test."""
import contextlib
import time
from pathlib import Path

import pytest

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
        "*4.00 MiB (4194304 bytes) at the peak: *.py:* test_exceeds_its_limit",
        "The program is too large by 352 MiB: *",
        "The program survives none of 1 injected failure; *",
        "signal 9 ended the program: *",
        "the mark gpu_memory has no argument `mem`: it takes gpu, *",
    ):
        result.stdout.fnmatch_lines_random(line)


WITHOUT_TORCH = """
import ctypes, pytest

def request():
    assert ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4 << 20)) == 0

@pytest.mark.gpu_memory(max_reserved="4MiB")
def test_fits():
    request()

@pytest.mark.gpu_memory(max_reserved="2MiB")
def test_exceeds_its_limit():
    request()

@pytest.mark.gpu_memory(max_allocated="8MiB")
def test_is_unknown():
    request()
"""


def test_limits_of_a_test_without_torch(pytester):
    pytester.makepyfile(WITHOUT_TORCH)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines_random([
        "peak reserved is 4.00 MiB (4194304 bytes), and max_reserved is 2.00 MiB (2097152 bytes)",
        "max_allocated: the peak is unknown, because no library of the test reports it; max_reserved limits *",
    ])


# Stands for JAX, which publishes no peak here.
JAX = {
    "__init__": """
import ctypes
used = 0
class Device:
    platform, local_hardware_id = "gpu", 0
    def memory_stats(self):
        return {"bytes_in_use": used}
def local_devices():
    return [Device()]
def ones():
    global used
    used = 3 << 20
    assert ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4 << 20)) == 0
""",
    "_src/__init__": "",
    "_src/xla_bridge": "import jax\ndef backends_are_initialized(): return jax.used > 0\ndef backends(): return {'cuda': jax}",
}
FIXTURE = """
import pytest

@pytest.mark.gpu_memory(memory="2GiB")
def test_of_a_library(gpu_memory):
    import jax
    assert set(gpu_memory().values()) == {0}
    jax.ones()
    figures = {name: figure for name, figure in gpu_memory().items() if name != "ooms"}
    assert figures == {"allocated": 3 << 20, "reserved": 4 << 20, "peak_allocated": None, "peak_reserved": 4 << 20, "retries": None}
    assert set(gpu_memory(1).values()) == {0}

@pytest.mark.gpu_memory(memory="2GiB")
def test_of_torch(gpu_memory):
    import torch
    assert set(gpu_memory().values()) == {0}
    kept = torch.zeros(3 << 20, dtype=torch.uint8, device="cuda")
    assert (gpu_memory()["allocated"], gpu_memory()["peak_reserved"]) == (3 << 20, 20 << 20)

def test_without_a_mark(gpu_memory):
    gpu_memory()
"""


def test_the_fixture_has_the_figures_of_the_library_of_the_test(pytester):
    pytester.makepyfile(**{f"jax/{name}": text for name, text in JAX.items()}, test_fixture=FIXTURE)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines_random("*the fixture gpu_memory has figures of torch, and under `harness exec` also of other libraries: mark *")


# Every child ends differently.
ENDS = """
import os, signal, sys, time, pytest
pytestmark = pytest.mark.gpu_memory(memory="2GiB")

def test_passes_and_prints_bytes():
    os.write(1, b"\\xff\\xfe")
    sys.__stdout__.buffer.write(b"\\xff" * (1 << 20))

@pytest.mark.parametrize("text", ["a::b", "[", "a b\\n", "\\x00", "-k", "a[b]c", "\\udcff"])
def test_passes_with(text):
    pass

def test_passes_in_the_parent_of_a_fork():
    if os.fork():
        os.wait()

def test_passes_and_leaves_a_process():
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)

def test_exits(capfd):
    with capfd.disabled():
        os.write(2, b"The program " * (1 << 16) + b"\\xfflast words\\n")
    os._exit(0)

def test_crashes():
    os.kill(os.getpid(), signal.SIGSEGV)

@pytest.fixture
def exits():
    yield
    os._exit(0)

def test_exits_in_its_teardown(exits):
    pass

@pytest.fixture
def torn(request):
    yield
    file = request.config.pluginmanager.getplugin("harness.pytest_plugin.child").file
    with file.open("ab") as file:
        file.write(b'{"nodeid": "\\xff')
    os._exit(0)

def test_tears_its_report(torn):
    pass

@pytest.fixture
def broken():
    raise ValueError("in the setup")

def test_has_a_broken_setup(broken):
    pass

@pytest.mark.skip(reason="a reason to skip")
def test_is_skipped():
    pass

def test_skips():
    pytest.skip("another reason")

@pytest.mark.xfail(reason="a reason to fail")
def test_fails_as_expected():
    assert False
"""


def test_a_test_fails_if_its_process_does_not_complete_it(pytester):
    pytester.makepyfile(ENDS)
    result = pytester.runpytest_subprocess("-rs", "-n2")
    # The call passes before the teardown ends the process.
    result.assert_outcomes(passed=12, failed=2, errors=3, skipped=2, xfailed=1)
    for line in (
        "the process of the test ended before the test did, with exit code 0:",
        "*\N{REPLACEMENT CHARACTER}last words",
        "the process of the test ended before the test did, with exit code 139:",
        "the process of the test ended in its teardown, with exit code 0:",
        "*ValueError: in the setup",
        "SKIPPED *a reason to skip",
        "SKIPPED *another reason",
    ):
        result.stdout.fnmatch_lines_random(line)
    assert "INTERNALERROR" not in result.stdout.str()


INI = """
[pytest]
addopts = -n2 --lf -m "not slow" --basetemp=temporary --junit-xml=tests.xml -p no:doctest
markers = slow: a test that needs an option
"""
CONFTEST = """
import pytest
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    if "is_repeated" not in item.name:
        return None
    for outcome in ("rerun", None):
        for report in runtestprotocol(item, nextitem=nextitem, log=False):
            if report.when == "call" and outcome:
                report.outcome = outcome
            item.ihook.pytest_runtest_logreport(report=report)
    return True

def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true")
    parser.addoption("--rows", type=int)

def pytest_collection_modifyitems(config, items):
    if not config.getoption("slow"):
        for item in items:
            item.add_marker(pytest.mark.skip)
"""
CONFIGURED = """
import subprocess, sys, pytest

@pytest.fixture(scope="module")
def ends():
    yield
    raise ValueError("at the end of the module")

def test_is_not_marked(ends, tmp_path):
    assert tmp_path.exists()

@pytest.mark.slow
@pytest.mark.gpu_memory(memory="2GiB")
def test_has_the_options(request, worker_id, tmp_path):
    assert request.config.getoption("rows") == 5 and tmp_path.exists()

attempts = []

@pytest.mark.gpu_memory(memory="2GiB")
def test_is_repeated():
    attempts.append(1)
    assert len(attempts) == 2

@pytest.mark.gpu_memory(memory="2GiB")
def test_is_repeated_and_ends():
    attempts.append(1)
    if len(attempts) == 2:
        import os
        os._exit(0)

@pytest.mark.gpu_memory(memory="2GiB")
def test_starts_another_pytest(tmp_path):
    inner = tmp_path / "test_inner.py"
    inner.write_text("import pytest\\ndef test_fails(): assert False")
    assert subprocess.run([sys.executable, "-m", "pytest", "-c", "/dev/null", inner]).returncode == 1
"""


def test_a_child_runs_its_test_with_the_options_of_its_parent(pytester):
    pytester.makefile(".ini", pytest=INI)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_one=CONFIGURED, test_two="def test_of_another_module(): pass")
    # Another folder than the root of the tests.
    folder = pytester.mkdir("folder")
    result = pytester.run(*pytester._getpytestargs(), "--rootdir=.", "-c", "pytest.ini", "--slow", "--rows=5", "-m", "", "-n0", "--basetemp=other")
    result.assert_outcomes(passed=5, failed=1, errors=1)
    result.stdout.fnmatch_lines_random("*ValueError: at the end of the module")
    assert not list(folder.iterdir())


PLUGIN = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--rows", type=int)
    parser.addoption("--part", type=int, default=0)
    parser.addoption("--copies", type=int, default=1)

def pytest_generate_tests(metafunc):
    if metafunc.config.getoption("copies") > 1:
        metafunc.fixturenames.append("copy")
        metafunc.parametrize("copy", range(metafunc.config.getoption("copies")))

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if config.getoption("part"):
        del items[: len(items) // 2]
"""


def test_a_child_has_the_options_of_other_plugins(pytester):
    pytester.makepyfile(
        other=PLUGIN,
        test_rows="""
        import pytest

        @pytest.mark.gpu_memory(memory="2GiB")
        def test_rows(request):
            assert request.config.getoption("rows") == 5
        """,
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "other", "--rows=5", "--part=1", "--copies=4")
    result.assert_outcomes(passed=2)


def is_running(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_killed_pytest_leaves_no_process(pytester):
    pytester.makepyfile(
        """
        import os, time, pytest

        @pytest.mark.gpu_memory(memory="2GiB")
        def test_waits():
            with open("pids.unfinished", "w") as file:
                print(os.getpid(), os.getppid(), file=file)
            os.rename("pids.unfinished", "pids")
            time.sleep(600)
        """
    )
    process = pytester.popen([*pytester._getpytestargs(), "-p", "no:cacheprovider"], stdin=None)
    pids = pytester.path / "pids"
    while not pids.exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.kill()
    process.wait()
    while any(map(is_running, pids.read_text().split())):
        time.sleep(0.1)


@pytest.mark.parametrize("program", ["missing", "pytest.ini", "/bin/true"])
def test_a_program_that_is_not_harness_fails_the_marked_test_only(pytester, program):
    pytester.makefile(".ini", pytest="[pytest]")
    pytester.makepyfile("""
        import pytest
        def test_is_not_marked(): pass
        @pytest.mark.gpu_memory(memory="2GiB")
        def test_is_marked(): pass
    """)
    result = pytester.runpytest_subprocess(f"--gpu-memory-harness={program}", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    expected = "the test did not start on the simulated GPU:" if program == "/bin/true" else f"the program `{program}` cannot start: *"
    result.stdout.fnmatch_lines_random(expected)


MARKS = {
    "memory=None": "memory=None is not a text or a number",
    "memory=True": "memory=True is not a text or a number",
    "memory='--help'": "*'--help' for '--memory <SIZE>'*",
    "memory=5": "*invalid value '5B' for '--memory <SIZE>'*",
    "memory='1GiB\\0'": "memory='1GiB\\x00' is not a text or a number",
    "gpu='nope'": "*invalid value 'nope' for '--gpu <GPU>'*",
    "devices='two'": "*invalid value 'two' for '--devices <N>'*",
    "values='some'": "*invalid value 'some' for '--values <WHAT>'*",
    "alloc_conf={}": "alloc_conf={} is not a text or a number",
    "fail=['any:1', 'x']": "*invalid value 'x' for '--fail *",
    "fail='any:7'": "`--fail any:7*` had no effect*",
    "faults=True": "faults=True is not a text: write 'all', 'sample:8' or 'largest:8'",
    "faults='sample:-1'": "*invalid value 'sample:-1' for '--every-fault*",
    "faults='all', baseline='x'": "faults with max_allocated, max_reserved or baseline: *",
    "baseline=5": "baseline=5 is not the path of a file",
    "baseline='no/file'": "*no/file: there is no such*",
    "baseline='none.json'": "*help: `pytest --gpu-memory-update` writes it*",
    "max_allocated=-1": "max_allocated=-1 is not a size: write a number of bytes, or '20GiB'",
    "max_reserved='20GB'": "max_reserved='20GB' is not a size: write a number of bytes, or '20GiB'",
    "'24GiB'": "the mark gpu_memory takes keyword arguments only, as in gpu_memory(memory='24GiB')",
}


def test_a_wrong_argument_of_the_mark_is_named(pytester):
    tests = [f"@pytest.mark.gpu_memory({mark})\ndef test_{number}(): pass\n" for number, mark in enumerate(MARKS)]
    pytester.makepyfile("import pytest\n" + "".join(tests))
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=len(MARKS))
    for line in MARKS.values():
        result.stdout.fnmatch_lines_random(line.replace("[", "[[]"))


def test_a_project_keeps_its_own_package_of_the_name_harness(pytester):
    pytester.makepyfile(**{"harness/__init__": "own = True", "test_own": """
        import os, subprocess, sys, pytest
        @pytest.mark.gpu_memory(memory="2GiB")
        def test_imports_it():
            import harness
            assert harness.own
        def test_imports_it_in_an_observed_process():
            command = [sys.executable, "-c", "import harness; print(harness.own)"]
            assert subprocess.check_output(command, env={**os.environ, "HARNESS_OBSERVE": "1"}) == b"True\\n"
    """})
    # Python has the folder of the project in its path.
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


def test_files_of_other_kinds_and_names_are_run(pytester):
    pytester.makeconftest("""
        import pytest
        def pytest_collection_modifyitems(items):
            for item in items:
                item.add_marker(pytest.mark.gpu_memory(memory="2GiB"))
        def pytest_collect_file(file_path, parent):
            return File.from_parent(parent, path=file_path) if file_path.suffix == ".gpu" else None
        class File(pytest.File):
            def collect(self):
                yield Item.from_parent(self, name="a::b [c")
        class Item(pytest.Item):
            def runtest(self):
                assert self.path.read_text() == "right"
    """)
    for name, text in (("right", "right"), ("wrong", "wrong"), ("in [a] folder/right", "right")):
        file = pytester.path / f"{name}.gpu"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    pytester.makepyfile("def documented():\n    '''\n    >>> 1 + 1\n    2\n    '''")
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "--doctest-modules").assert_outcomes(passed=3, failed=1)
