"""Runs tests on a simulated GPU: @pytest.mark.gpu_memory(memory="24GiB", max_reserved="20GiB").

Each marked test runs alone in a child process, `harness exec -- python -m pytest NODE`, which writes its reports and a memory snapshot for the parent.
`--gpu-memory` measures a whole suite, and `--gpu-memory-limit` lets its tests share a GPU (`harness.suite`).
"""
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest
from _gpu_oom_harness import suite
from _pytest.config import get_config

# Names the folder in which parent and child exchange files.
FOLDER = "HARNESS_PYTEST_FOLDER"
CHILD = "harness.pytest_plugin.child"
END = "harness.pytest_plugin: end of the test's output"
# The most bytes of a child's output that a report contains: the last ones.
MOST_OUTPUT = 64 << 10
# The keyword arguments of the mark that are options of `harness exec`.
OPTIONS = ("gpu", "memory", "devices", "context_overhead", "values", "alloc_conf", "fail")
SIZES = ("memory", "context_overhead")
MARK = """gpu_memory(memory, gpu, devices, values, alloc_conf, context_overhead, fail, max_allocated, max_reserved, baseline, faults): run the test on a \
simulated GPU. max_allocated and max_reserved limit the peaks; baseline names a file with the exact figures; faults="sample:8" repeats the test and \
fails an allocation each time, which it must survive"""
# Options of other plugins that the parent alone obeys: who runs the tests, and the files of all of them.
GROUPS_OF_PARENT = ("xdist", "cov")
OPTIONS_OF_PARENT = ("htmlpath", "json_report", "json_report_file", "report_log", "allure_report_dir", "clean_alluredir", "md_report_output")
# The figures of the fixture, and their names in the statistics of torch.
FIGURES = {
    "allocated": "allocated_bytes.all.current",
    "reserved": "reserved_bytes.all.current",
    "peak_allocated": "allocated_bytes.all.peak",
    "peak_reserved": "reserved_bytes.all.peak",
    "retries": "num_alloc_retries",
    "ooms": "num_ooms",
}
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None)


class Invalid(Exception):
    """A mark or an environment that cannot be used."""


def pytest_addoption(parser):
    group = parser.getgroup("gpu_memory", "tests on a simulated GPU")
    group.addoption("--gpu-memory-harness", metavar="PROGRAM", help="the program `harness` [default: next to this Python, or in PATH]")
    group.addoption("--gpu-memory-update", action="store_true", help="write the baselines of the mark gpu_memory instead of comparing with them")
    suite.add_options(group)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    """Runs all tests in a child process on a simulated GPU, before this process imports anything that needs a GPU."""
    options = early_config.known_args_namespace
    # A child runs tests of its parent.
    if options.gpu_memory and suite.runs_tests(options) and not {FOLDER, suite.FOLDER} & set(os.environ):
        try:
            raise SystemExit(int(suite.measure(early_config, options, harness(options), call)))
        except Invalid as error:
            raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    config.addinivalue_line("markers", MARK)
    # Processes that the test starts are none of the parent's.
    folder = os.environ.pop(FOLDER, None)
    if folder:
        config.pluginmanager.register(Child(config, Path(folder)), CHILD)
        return
    try:
        suite.configure(config, size)
    except Invalid as error:
        raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config):
    """The number of workers of `-n auto` that share a GPU."""
    if not config.option.gpu_memory_limit:
        return None
    try:
        return suite.Plan(config, size).workers(len(os.sched_getaffinity(0)))
    except Invalid as error:
        raise pytest.UsageError(str(error)) from None


class Child:
    """Runs the parent's test only, and writes its reports, one per line."""

    def __init__(self, config, folder):
        given = json.loads((folder / "test.json").read_bytes())
        vars(config.option).update(given["options"])
        self.config, self.test, self.file = config, given["test"], folder / "reports"
        # A fork that returns from the test would report it too.
        os.register_at_fork(after_in_child=self.stop)

    def stop(self):
        self.file = None

    def pytest_ignore_collect(self, collection_path):
        file = Path(self.test[0])
        return None if collection_path == file or collection_path in file.parents or "[" not in str(file) else True

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items):
        selected = items[:] = [item for item in items if key(item) == self.test]
        try:
            return (yield)
        finally:
            # A plugin that runs a part of the tests has selected this one in the parent.
            items[:] = selected

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        if self.file:
            with self.file.open("a") as file:
                print(json.dumps(data, default=str), file=file)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self):
        try:
            os.write(2, f"\n{END}\n".encode())
        except OSError:
            pass


def key(item):
    """Identifies a test also in a child that collects its file only, so the file has another name in the node ID."""
    return [str(item.path), item.nodeid.partition("::")[2]]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    mark = item.get_closest_marker("gpu_memory")
    if mark is None or item.config.pluginmanager.hasplugin(CHILD):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    try:
        reports = run(item, mark)
    except (Invalid, pytest.fail.Exception) as error:
        # pytest-timeout fails this process too.
        reports = [failure(item, str(error))]
    except Exception:
        reports = [failure(item, traceback.format_exc())]
    # Fixtures of earlier tests end here if the next test does not use them. Plugins make no report of this, because they have not set up this test.
    ended = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), when="teardown")
    if ended.excinfo:
        reports.append(failure(item, str(ended.excinfo.getrepr()), "teardown"))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def run(item, mark):
    """Runs the test in a child process and returns its reports."""
    program = harness(item.config.option)
    options, limits = arguments(mark)
    if "baseline" in mark.kwargs:
        options.append(f"--baseline={item.path.parent / mark.kwargs['baseline']}")
        options += ["--update"] if item.config.getoption("--gpu-memory-update") else []
    with tempfile.TemporaryDirectory(prefix="harness-pytest-") as folder:
        record, snapshot, output = (Path(folder) / name for name in ("record.json", "snapshot.pickle", "output"))
        if "faults" not in mark.kwargs:
            options += [f"--record={record}", f"--snapshot={snapshot}"]
        given = {"test": key(item), "options": dict(plain_options(item.config))}
        (Path(folder) / "test.json").write_text(json.dumps(given))
        # pytest takes a bracket in an argument for parameters.
        collected = next(path for path in (item.path, *item.path.parents) if "[" not in str(path))
        test = [sys.executable, "-m", "pytest", "-p", __name__, *inherited(item.config, folder), str(collected)]
        code = call([program, "exec", *options, "--", *test], output, {FOLDER: folder, "PYTEST_ADDOPTS": ""}, item.config.invocation_params.dir)
        attempts = reports(item, Path(folder) / "reports")
        found, last = sum(attempts, []), attempts[-1]
        if not found:
            return [failure(item, f"the test did not start on the simulated GPU:\n{tail(output)}")]
        if is_repeated(last) or last[0].passed and not any(report.when == "call" for report in last):
            return [*found, failure(item, f"the process of the test ended before the test did, with exit code {code}:\n{tail(output)}")]
        if found[-1].when != "teardown":
            return [*found, failure(item, f"the process of the test ended in its teardown, with exit code {code}:\n{tail(output)}", "teardown")]
        failed = next((report for report in found if report.failed), None)
        problem = None
        if failed and snapshot.exists() and "OutOfMemoryError" in failed.longreprtext:
            call([program, "explain", str(snapshot)], output)
            failed.sections.append(("GPU memory", tail(output)))
        elif not failed and code:
            messages = tail(output).rpartition(END)[2]
            start = re.search(r"^(?:baseline: |The program |`--)", messages, re.MULTILINE)
            problem = messages[start.start() if start else 0 :].strip() or f"the process of the test ended with exit code {code}"
        elif not failed and record.exists():
            problem = above(json.loads(record.read_bytes()), limits)
        if problem:
            problem += lines_at_peak(program, snapshot) if problem.startswith("peak ") else ""
            # pytest-xdist expects one report of the call.
            found = [report for report in found if report.when != "call"] + [failure(item, problem)]
        return found


def inherited(config, folder):
    """Yields the arguments with which the child runs the test as this process would."""
    option = config.option
    yield f"--rootdir={config.rootpath}"
    yield f"--import-mode={option.importmode}"
    if config.inipath:
        yield from ("-c", str(config.inipath))
    for name, values in (("-p", option.plugins), ("-o", option.override_ini), ("-W", option.pythonwarnings)):
        for value in values or ():
            yield from (name, value)
    for name, argument in (("runxfail", "--runxfail"), ("doctestmodules", "--doctest-modules")):
        if getattr(option, name, False):
            yield argument
    # The following arguments replace options in the project's `addopts`. The test is already selected.
    yield from ("-m", "", "-k", "")
    if config.pluginmanager.hasplugin("cacheprovider"):
        yield from ("-o", f"cache_dir={folder}/cache")
    if option.basetemp:
        yield f"--basetemp={folder}/temporary"
    if getattr(option, "xmlpath", None):
        yield "--junit-xml="
    if config.pluginmanager.hasplugin("xdist"):
        yield "-n0"
    if config.pluginmanager.hasplugin("pytest_cov"):
        yield "--no-cov"


def plain_options(config):
    """Yields the values of the options of other plugins and of the project's conftest files."""
    dests = lambda config, skipped=(): {option.dest for group in groups(config) if group.name not in skipped for option in group.options}
    others = dests(config, GROUPS_OF_PARENT) - dests(get_config()) - {"gpu_memory_harness", "gpu_memory_update", *OPTIONS_OF_PARENT}
    for name, value in vars(config.option).items():
        if name in others:
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                continue
            yield name, value


def groups(config):
    return [config._parser._anonymous, *config._parser._groups]


def call(command, output=None, variables=None, folder=None):
    """Runs a command to its end and returns its exit code; without `output`, it writes where this process does. If this process is interrupted or killed,
    the command ends with all that it started."""
    parent = os.getpid()

    def end_with_parent():
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    with output.open("wb") if output else contextlib.nullcontext() as file:
        try:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT} if file else {}
            process = subprocess.Popen(command, env={**os.environ, **(variables or {})}, cwd=folder, preexec_fn=end_with_parent, **streams)
        except (OSError, ValueError) as error:
            raise Invalid(f"the program `{command[0]}` cannot start: {error}") from None
        try:
            return process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise


def tail(output):
    """Returns the end of a file as text."""
    with output.open("rb") as file:
        cut = max(0, output.stat().st_size - MOST_OUTPUT)
        file.seek(cut)
        text = file.read().decode(errors="replace")
    return f"({cut} bytes of output are left out)\n{text}" if cut else text


def reports(item, file):
    """Returns the reports that the process of the test has completed: a list for each attempt, because some plugins repeat failed tests."""
    attempts = [[]]
    for line in file.read_bytes().splitlines() if file.exists() else []:
        try:
            data = json.loads(line)
            # JSON has no tuples.
            data.update((name, tuple(data[name])) for name in ("location", "longrepr") if isinstance(data.get(name), list))
            report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
            report.nodeid = item.nodeid
        except Exception:
            # The process ended in the middle of it.
            break
        # The reports of runs with injected failures follow.
        is_last = not is_repeated(attempts[-1])
        if report.when == "setup" and attempts[-1]:
            if is_last:
                break
            attempts.append([])
        attempts[-1].append(report)
        if report.when == "teardown" and is_last:
            break
    return attempts


def is_repeated(attempt):
    return any(report.outcome == "rerun" for report in attempt)


def arguments(mark):
    """Returns the options of `harness exec` and the limits of a mark."""
    if mark.args:
        raise Invalid("the mark gpu_memory takes keyword arguments only, as in gpu_memory(memory='24GiB')")
    options, limits = [], {}
    for name, value in mark.kwargs.items():
        if name in OPTIONS:
            values = value if name == "fail" and isinstance(value, (list, tuple)) else [value]
            if not all(isinstance(value, (str, int)) and not isinstance(value, bool) and "\0" not in str(value) for value in values):
                raise Invalid(f"{name}={value!r} is not a text or a number")
            unit = "B" if name in SIZES and isinstance(value, int) else ""
            options += [f"--{name.replace('_', '-')}={value}{unit}" for value in values]
        elif name == "faults":
            if not isinstance(value, str) or "\0" in value:
                raise Invalid(f"faults={value!r} is not a text: write 'all', 'sample:8' or 'largest:8'")
            options += [f"--every-fault={value}", "--expect", "recovers"]
        elif name in ("max_allocated", "max_reserved"):
            limits[name.removeprefix("max_")] = size(name, value)
        elif name == "baseline":
            if not isinstance(value, (str, os.PathLike)) or not str(value) or "\0" in str(value):
                raise Invalid(f"baseline={value!r} is not the path of a file")
        else:
            known = ", ".join((*OPTIONS, "faults", "baseline", "max_allocated", "max_reserved"))
            raise Invalid(f"the mark gpu_memory has no argument `{name}`: it takes {known}")
    if "faults" in mark.kwargs and (limits or "baseline" in mark.kwargs):
        raise Invalid("faults with max_allocated, max_reserved or baseline: the peaks belong to a run without failures, so write two tests")
    return options, limits


def size(name, value):
    """Returns the bytes of a size such as 20GiB, or of a number."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = isinstance(value, str) and re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]iB|B)", value)
    if not match:
        raise Invalid(f"{name}={value!r} is not a size: write a number of bytes, or '20GiB'")
    return int(float(match[1]) * suite.UNITS[match[2]])


def above(record, limits):
    """Returns a line for each limit that the highest peak of all devices exceeds."""
    used = [process for process in record["processes"] if any(device["mallocs"] for device in process["devices"])]
    killed = [process["pid"] for process in used if (process["torch"] or {}).get("statistics") == "at_least"]
    lines = [f"the peak of process {pid} is unknown, because it ended before torch could report" for pid in killed]
    for name, limit in limits.items():
        found = [peak for process in used if process["pid"] not in killed for peak in peaks(process, name)]
        if None in found:
            lines.append(f"max_{name}: the peak is unknown, because no library of the test reports it; max_reserved limits what the test requests from the driver")
        elif not found and not killed:
            lines.append(f"max_{name}: the test did not use the GPU")
        elif max(found, default=0) > limit:
            lines.append(f"peak {name} is {text(max(found))}, and max_{name} is {text(limit)}")
    return "\n".join(lines)


def peaks(process, name):
    """Returns the peaks of a process on its devices, `None` if unknown. Without torch, reserved memory is what the driver has served."""
    torch = process["torch"] or {"library": None}
    if name == "reserved" and "library" in torch:
        return [device["peak_reserved"] for device in process["devices"]]
    return [device.get(f"{name}_bytes.all.peak") for device in (torch.get("memory_stats") or {}).values()] or [None]


def lines_at_peak(program, snapshot):
    """Returns the three lines of the program that hold most at the peak of allocated memory."""
    command = [program, "explain", "--at", "peak", "--format", "json", str(snapshot)]
    try:
        explained = json.loads(subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)
    except ValueError:
        # No snapshot, or nothing was recorded.
        return ""
    device = max(explained.get("snapshots", [explained]), key=lambda device: device["accounts"]["allocated"])
    sites = [site for cause in device["causes"] if cause["cause"] == "allocated" for site in cause["sites"]]
    return "".join(f"\n  {text(site['bytes'])} at the peak: {site['site']}" for site in sites[:3])


def text(size):
    return f"{suite.size(size)} ({size} bytes)"


def harness(options):
    beside = Path(sys.executable).with_name("harness")
    program = options.gpu_memory_harness or (str(beside) if beside.exists() else shutil.which("harness"))
    if not program:
        raise Invalid("the program `harness` is not installed: install the wheel into this environment, or name it with --gpu-memory-harness")
    return program


def failure(item, message, when="call"):
    message = message.replace("`--update`", "`pytest --gpu-memory-update`")
    return pytest.TestReport(item.nodeid, item.location, {name: 1 for name in item.keywords}, "failed", message, when)


def statistics(device):
    """Returns the statistics of this process on a GPU, under the names of torch, without those that its library does not publish."""
    torch = sys.modules.get("torch")
    if suite.is_initialized(torch):
        return torch.cuda.memory_stats(device)
    # The modules of the hook of `harness exec`, which are not installed.
    libraries, counters = sys.modules.get("harness_libraries"), sys.modules.get("harness_counters")
    if libraries is None and not hasattr(torch, "cuda"):
        pytest.fail("the fixture gpu_memory has figures of torch, and under `harness exec` also of other libraries: mark the test with gpu_memory")
    used = counters.read(os.environ.get("HARNESS_GPU_LIMITS_RUN") or os.environ["HARNESS_GPU_RUN"]) if libraries else None
    if not used or device not in used.devices:
        return dict.fromkeys(FIGURES.values(), 0)
    published, _ = libraries.published(list(used.devices))
    published = {name: found for name, found in published.items() if libraries.is_in_use(found)} or published
    of_driver = {"reserved_bytes.all.current": used.devices[device].used, "reserved_bytes.all.peak": used.devices[device].peak}
    return {**libraries.sum_of(published).get(str(device), {}), **of_driver, "num_ooms": libraries.errors}


@pytest.fixture
def gpu_memory():
    """The memory of this process on a GPU so far: `gpu_memory(device=0)` returns allocated, reserved, their peaks, retries and OOMs; None if unknown."""

    def figures(device=0):
        found = statistics(device)
        return {name: found.get(key) for name, key in FIGURES.items()}

    return figures
