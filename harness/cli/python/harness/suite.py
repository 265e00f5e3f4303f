"""The GPU memory that each test of a suite needs, and runs in which the tests share a GPU.

    pytest --gpu-memory                                 # measures each test on a simulated GPU, and writes gpu-memory.json
    pytest -n auto --gpu-memory-limit 24GiB             # a test waits while it and those that run would need more than 24 GiB

A part of the pytest plugin.
"""
import contextlib
import fcntl
import gc
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

import pytest

VERSION = 1
# Names the folder in which the processes of a measured run write a file of rows each.
FOLDER = "HARNESS_PYTEST_SUITE"
# The key under which workers of pytest-xdist get the file of `Shared`.
SHARED = "harness.suite.shared"
# The most that a process used besides its allocations on an H200: context, and cuBLAS, cuDNN and cuSOLVER (`harness exec --context-overhead h200`).
CONTEXT = "800MiB"
# The outcome of a test during which its process ended.
ENDS = "ended the process"
# Libraries that keep memory until the process ends, and how to measure each test.
KEEPING = {
    "JAX": "XLA_PYTHON_CLIENT_ALLOCATOR=platform pytest --gpu-memory measures each test.",
    "TensorFlow": "Of its own is the peak of its tensors. The mark gpu_memory measures a test in its own process.",
}
# Where Python keeps the frames of the last failed test, and what their variables hold.
LAST_ERROR = "last_exc", "last_type", "last_value", "last_traceback"
# Lines of the table: the tests that need most, and those that leave most.
ROWS, LEAVING = 15, 5
UNITS = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
# Seconds between two looks at the memory that others use.
PAUSE = 0.01
# More workers that save less than this part of the time are not worth their contexts.
WORTH = 0.02


def add_options(group):
    group.addoption("--gpu-memory", action="store_true", help="run all tests on a simulated GPU, and write the memory that each needs")
    group.addoption("--gpu-memory-options", metavar="OPTIONS", default="", help="options of `harness exec` for this run, as in '--gpu l40s-48 --values cpu'")
    group.addoption("--gpu-memory-file", metavar="FILE", help="where the memory of each test is written and read [default: gpu-memory.json next to the configuration]")
    group.addoption("--gpu-memory-limit", metavar="SIZE", help="let tests wait until they and those that run need at most this memory, as in 24GiB; with `-n auto`, also choose the number of workers")
    group.addoption("--gpu-memory-context", metavar="SIZE", default=CONTEXT, help="memory that each process uses besides its allocations [default: %(default)s]")


def configure(config, bytes_of):
    """Measures the tests of this process, or lets them wait for memory, or neither."""
    worker = getattr(config, "workerinput", {})
    folder = os.environ.get(FOLDER) or worker.get(FOLDER)
    if folder:
        # Runs of pytest that a test starts are no part of this one.
        os.environ[FOLDER] = ""
        config.pluginmanager.register(Measured(Path(folder)), __name__)
    elif config.option.gpu_memory_limit:
        config.pluginmanager.register(Sharing(Plan(config, bytes_of), worker.get(SHARED)), __name__)


def path_of_rows(config, options):
    return Path(config.invocation_params.dir, options.gpu_memory_file) if options.gpu_memory_file else config.rootpath / "gpu-memory.json"


# A measured run


def runs_tests(options):
    return not any(getattr(options, name, False) for name in ("help", "version", "collectonly", "markers", "showfixtures", "show_fixtures_per_test"))


def measure(config, options, harness, call):
    """Runs the tests in a child process on a simulated GPU, again without those that ended it, and writes what they need. Returns the exit code."""
    path = path_of_rows(config, options)
    tests = earlier_rows(path, options.gpu_memory_options)
    try:
        given = shlex.split(options.gpu_memory_options)
    except ValueError as error:
        raise pytest.UsageError(f"--gpu-memory-options={options.gpu_memory_options}: {error}") from None
    if not is_settled(config, given):
        # With an explicit choice, no failed test makes `harness exec` repeat the suite.
        given.append("--values=copies")
    command = [harness, "exec", "--quiet", *given, "--", sys.executable, "-m", "pytest", *map(str, config.invocation_params.args)]
    ends = []
    with tempfile.TemporaryDirectory(prefix="harness-pytest-") as folder:
        while True:
            try:
                code = call(command, None, {FOLDER: folder}, config.invocation_params.dir)
            except KeyboardInterrupt:
                rows, code = [row for row in read_rows(Path(folder)) if row["outcome"] != ENDS], pytest.ExitCode.INTERRUPTED
                break
            rows, before = read_rows(Path(folder)), len(ends)
            ends = [row for row in rows if row["outcome"] == ENDS]
            # Each run leaves out one more test, so this loop ends.
            if len(ends) == before:
                break
    if not rows:
        print(f"\nno test ran on the simulated GPU: `{shlex.join(command)}` ended with exit code {code}", file=sys.stderr)
        return code or pytest.ExitCode.NO_TESTS_COLLECTED
    measured = {row.pop("test"): row for row in rows}
    write(path, {"version": VERSION, "options": options.gpu_memory_options, "tests": {**tests, **measured}})
    print("\n" + table(measured, path))
    if ends and code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return pytest.ExitCode.TESTS_FAILED
    return code


def is_settled(config, options):
    """Whether options, environment or a file of the repository choose the values that programs read (`harness exec --values`)."""
    folder = config.invocation_params.dir
    files = (above / ".harness.yml" for above in (folder, *folder.parents))
    return bool(os.environ.get("HARNESS_VALUES")) or any(option.startswith("--values") for option in options) or any(map(Path.exists, files))


def earlier_rows(path, options):
    """The rows of tests that an earlier run has measured in the same way. Tests that do not run now keep theirs."""
    if not path.parent.is_dir() or path.is_dir():
        raise pytest.UsageError(f"--gpu-memory-file: {shown(path)} cannot be written")
    try:
        found = read(path)
    except (OSError, Unreadable):
        return {}
    return found["tests"] if found["options"] == options else {}


class Unreadable(Exception):
    """Not a file of `--gpu-memory`."""


def read(path):
    """Reads a file of `--gpu-memory`."""
    try:
        data = json.loads(path.read_text())
        version = data["version"]
        if version == VERSION:
            for row in data["tests"].values():
                row["outcome"], row["seconds"] + 0, row["start"], row["peak"], row["uses_gpu"]
            return {"options": data["options"], "tests": data["tests"]}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Unreadable(f"cannot be read: {error!r}") from None
    raise Unreadable(f"has version {version}, not {VERSION}")


def write(path, data):
    """Writes JSON with a line for each test, whole or not at all."""
    tests = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(data["tests"].items()))
    head = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in data.items() if name != "tests")
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(f'{{\n{head}  "tests": {{\n{tests}\n  }}\n}}\n')
    unfinished.replace(path)


def read_rows(folder):
    """Returns a row for each test, also for those during which a process ended."""
    rows = []
    for path in sorted(folder.glob("*.rows")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        own, begun = [line for line in lines if "test" in line], [line["begins"] for line in lines if "begins" in line]
        rows += own
        if len(begun) > len(own):
            unknown = dict.fromkeys(("start", "peak", "uses_gpu", "reads", "leaves"))
            rows.append({"test": begun[-1], "outcome": ENDS, "seconds": 0, **unknown})
    return rows


def table(tests, path):
    """Returns the tests that need most, and counts of the rest."""
    using = {name: row for name, row in tests.items() if row["uses_gpu"]}
    largest = sorted(using.items(), key=lambda item: (-item[1]["peak"], -own(item[1]), item[0]))
    lines = [f"GPU memory of {count(len(tests), 'test')}, in {shown(path)}:"]
    lines += [f"{'fits into':>12}{'of its own':>12}  test"] if largest else []
    for name, row in largest[:ROWS]:
        doubt = " (or another size: see the values below)" if row["reads"] else ""
        doubt += f" (includes what {' and '.join(row['keeps'])} keeps: see below)" if row.get("keeps") else ""
        of_its_own = "unknown" if row.get("keeps") and "own" not in row else size(own(row))
        lines.append(f"{size(row['peak']):>12}{of_its_own:>12}  {name}{doubt}")
    if len(largest) > ROWS:
        lines.append(f"{len(largest) - ROWS} more fit into {size(largest[ROWS][1]['peak'])} or less.")
    said = [
        (sum(row["uses_gpu"] is False for row in tests.values()), "{} used no GPU."),
        (sum(row["outcome"] == "failed" for row in tests.values()), "{} failed."),
        (sum(row["outcome"] == ENDS for row in tests.values()), "{} ended the process: the memory is unknown."),
        (sum(bool(row["reads"]) for row in tests.values()), "{} read values that nothing computed. --gpu-memory-options='--values cpu' computes those of torch."),
    ]
    said += [
        (sum(library in row.get("keeps", ()) for row in tests.values()), f"{{}} ran next to memory that {library} keeps until the process ends. {advice}")
        for library, advice in KEEPING.items()
    ]
    leaving = sorted(((row["leaves"], name) for name, row in tests.items() if row["leaves"]), reverse=True)
    lines += [f"{size(leaves)} stay in use after {name}" for leaves, name in leaving[:LEAVING]]
    if len(leaving) > LEAVING:
        lines.append(f"{count(len(leaving) - LEAVING, 'more test')} left memory in use.")
    return "\n".join(lines + [text.format(count(number, "test")) for number, text in said if number])


def own(row):
    """The bytes that a test adds to those in use before. Next to memory that a library keeps, only its statistics can show them."""
    return row.get("own", 0) if row.get("keeps") else row["peak"] - row["start"]


def count(number, noun):
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown(path):
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else path


def used(counters):
    """The bytes that a process uses on the device of which it uses most."""
    return max((device.used for device in counters.devices.values()), default=0) if counters else 0


def work(counters):
    """What a process has submitted to the GPU, and requests of memory."""
    return counters.submitted + sum(device.requests for device in counters.devices.values()) if counters else 0


def size(number):
    unit = next(unit for unit in UNITS if number >= UNITS[unit] or unit == "B")
    return f"{number / UNITS[unit]:.2f} {unit}" if unit != "B" else f"{number} B"


def is_initialized(torch):
    """Whether this process has a context of torch. Otherwise it must not get one."""
    return hasattr(torch, "cuda") and torch.cuda.is_initialized()


def release_caches():
    """Gives memory that nothing holds back to the GPU."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if is_initialized(torch):
        with contextlib.suppress(RuntimeError):
            # An earlier error of the GPU also ends this call.
            torch.cuda.empty_cache()
    if hasattr(cupy, "get_default_memory_pool"):
        cupy.get_default_memory_pool().free_all_blocks()


def keeping_libraries():
    """The libraries of this process whose allocator has memory that it never returns. One that requests each tensor from the driver publishes no statistics."""
    libraries = sys.modules["harness_libraries"]
    found = [library for library in libraries.imported() if library.NAME in KEEPING]
    with contextlib.suppress(Exception):
        found = [library for library in found if any(library.statistics(sys.modules[library.MODULE], []).values())]
    return [library.NAME for library in found]


def tensors(kind, used, restart=False):
    """The bytes of the tensors on each device, or their peak, if one library alone uses the GPU and can restart its peaks; otherwise none."""
    libraries = sys.modules["harness_libraries"]
    found, _ = libraries.published(list(used.devices) if used else [])
    if is_initialized(sys.modules.get("torch")) or len(found) != 1:
        return {}
    library = next(library for library in libraries.imported() if library.NAME in found)
    with contextlib.suppress(Exception):
        if restart:
            library.restart_peaks(sys.modules[library.MODULE])
        return {device: stats[f"allocated_bytes.all.{kind}"] for device, stats in found[library.NAME].items() if hasattr(library, "restart_peaks")}
    return {}


class Measured:
    """Writes a row for each test of this process."""

    def __init__(self, folder):
        # The module of the hook of `harness exec`, which is not installed.
        self.counters = sys.modules["harness_counters"]
        self.run = os.environ["HARNESS_GPU_RUN"]
        self.folder, self.outcome = folder, None
        # The bytes of fixtures that several tests use.
        self.fixtures = {}
        self.path = folder / f"{os.getpid()}.rows"
        self.path.touch()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput[FOLDER] = str(self.folder)

    def pytest_collection_modifyitems(self, config, items):
        done = {row["test"] for row in read_rows(self.folder)}
        rest = [item for item in items if item.nodeid not in done]
        if len(rest) < len(items):
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
            items[:] = rest

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        release_caches()
        self.append({"begins": item.nodeid})
        ended = self.restart()
        before, of_fixtures = self.counters.read(self.run), sum(self.fixtures.values())
        tensors_before = tensors("current", before, restart=True)
        begun, self.outcome = time.monotonic(), "passed"
        yield
        seconds = time.monotonic() - begun
        after, start = self.counters.read(self.run), used(before)
        # At most their sum: they may have run one after the other.
        processes = sum(peak for pid, peak in self.others().items() if pid not in ended)
        peak = max((device.recent_peak for device in after.devices.values()), default=0) if after else 0
        own_tensors = [peak - tensors_before.get(device, 0) for device, peak in tensors("peak", after).items()]
        for name in LAST_ERROR:
            vars(sys).pop(name, None)
        left = self.without_cycles(lambda used: used - sum(self.fixtures.values()) > start - of_fixtures)
        keeps = keeping_libraries()
        self.append({
            "test": item.nodeid,
            "outcome": self.outcome,
            "seconds": round(seconds, 3),
            "start": start,
            "peak": peak + processes,
            # The memory of a fixture may be requested by another test.
            "uses_gpu": bool(processes) or bool(of_fixtures) and self.outcome != "skipped" or work(after) > work(before) or any(own_tensors),
            "reads": after.uncomputed_reads - (before.uncomputed_reads if before else 0) if after else 0,
            "leaves": None if keeps else max(0, left - sum(self.fixtures.values()) - start + of_fixtures),
            **({"keeps": keeps} if keeps else {}),
            **({"own": max(own_tensors)} if keeps and own_tensors else {}),
        })

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        if fixturedef.scope == "function":
            yield
            return
        release_caches()
        before = used(self.counters.read(self.run))
        yield
        release_caches()
        self.fixtures[fixturedef] = max(0, used(self.counters.read(self.run)) - before)

    def pytest_fixture_post_finalizer(self, fixturedef):
        self.fixtures.pop(fixturedef, None)

    def without_cycles(self, is_more):
        """The bytes in use, if necessary without those of objects in cycles."""
        release_caches()
        if is_more(used(self.counters.read(self.run))):
            gc.collect()
            release_caches()
        return used(self.counters.read(self.run))

    def others(self):
        """The peaks of processes that tests have started and that run, or have ended, by number. Other workers measure their own tests."""
        found = {}
        for path in Path(self.run).glob("*.counters"):
            if not (self.folder / f"{path.stem}.rows").exists():
                read = self.counters.read(self.run, int(path.stem))
                found[path.stem] = max((device.recent_peak for device in read.devices.values()), default=0) if read else 0
        return found

    def restart(self):
        """Begins the peaks of this process, and of the processes that tests have started before. Returns the numbers of those that have ended."""
        self.counters.restart_peaks(self.run)
        others = self.others()
        for pid in others:
            self.counters.restart_peaks(self.run, int(pid))
        return {pid for pid in others if not is_alive(pid)}

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.outcome = "failed"
        elif report.skipped and self.outcome == "passed" and not hasattr(report, "wasxfail"):
            self.outcome = "skipped"

    def append(self, row):
        with self.path.open("a") as file:
            print(json.dumps(row), file=file)


# Runs in which the tests share a GPU


class Plan:
    """What each test needs, and the number of workers with which the tests take the least time."""

    def __init__(self, config, bytes_of):
        path, names = path_of_rows(config, config.option), ("--gpu-memory-limit", "--gpu-memory-context")
        self.limit, self.context = (bytes_of(name, config.getoption(name)) for name in names)
        try:
            rows = read(path)["tests"]
        except FileNotFoundError:
            raise pytest.UsageError(f"--gpu-memory-limit: {shown(path)} is missing: `pytest --gpu-memory` writes it") from None
        except (OSError, Unreadable) as error:
            raise pytest.UsageError(f"--gpu-memory-limit: {shown(path)} {error}: write it anew with `pytest --gpu-memory`") from None
        self.tests = {name: row for name, row in rows.items() if row["outcome"] != ENDS}
        self.needs = {name: row["peak"] for name, row in self.tests.items() if row["uses_gpu"]}
        self.seconds = {name: row["seconds"] for name, row in self.tests.items()}
        if self.limit <= self.context:
            raise pytest.UsageError(f"--gpu-memory-limit: {size(self.limit)} is not more than --gpu-memory-context, {size(self.context)}")
        workers = getattr(config.option, "numprocesses", None)
        # `-n auto` asks for the number later.
        if isinstance(workers, int) and workers > max(1, self.most_workers()):
            text = f"--gpu-memory-limit: {size(self.limit)} is too little for {workers} workers, which take {size(self.context)} each besides the tests"
            raise pytest.UsageError(f"{text}: start at most {max(1, self.most_workers())}, or `-n auto`")

    def need(self, name):
        """The bytes with which a test starts: none without a GPU, and all that there are if it was not measured."""
        if name not in self.tests:
            return self.limit
        return self.needs[name] + self.context if name in self.needs else 0

    def wanted(self, name, kept):
        """The bytes of a process during a test, in which it has `kept` before: what it keeps may be none of what the test had when it was measured."""
        own = self.needs.get(name, 0) - self.tests.get(name, {}).get("start", 0)
        return max(self.need(name), kept + own if kept else 0)

    def most_workers(self):
        """The number of workers whose contexts leave enough memory for any test."""
        largest = max((need for need in self.needs.values() if need + self.context <= self.limit), default=0)
        return (self.limit - 1 - largest) // self.context if self.context else sys.maxsize

    def workers(self, processors):
        """The number of workers after which more save no time: they cannot work at once, or their contexts take the memory."""
        total, longest = sum(self.seconds.values()), max(self.seconds.values(), default=0)
        area = sum(self.seconds[name] * need for name, need in self.needs.items())
        most = max(1, min(processors, self.most_workers()))
        times = {workers: max(total / workers, area / (self.limit - workers * self.context), longest) for workers in range(1, most + 1)}
        return min(workers for workers, time in times.items() if time <= (1 + WORTH) * min(times.values()))

    def describe(self, items):
        """What the user should know before the tests run."""
        unknown = [item.nodeid for item in items if item.nodeid not in self.tests]
        large = [item.nodeid for item in items if item.nodeid in self.tests and self.need(item.nodeid) > self.limit]
        for names, text in ((unknown, "not measured yet: run `pytest --gpu-memory` again"), (large, f"measured with more than {size(self.limit)}")):
            if names:
                yield f"{count(len(names), 'test')} {'runs' if len(names) == 1 else 'run'} alone, {text}: {names[0]}{', ...' if len(names) > 1 else ''}"


def is_alive(pid):
    """Whether a process runs. One that has ended exists until its parent asks for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Shared:
    """The memory of a GPU, which the processes of a run share. A file has what each uses, whether it runs a test, and who waits, first come, first served."""

    def __init__(self, path, limit):
        self.path, self.limit, self.pid = path, limit, str(os.getpid())

    @contextlib.contextmanager
    def state(self):
        with open(self.path, "a+") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            opened.seek(0)
            state = json.loads(opened.read() or '{"used": {}, "running": [], "waiting": []}')
            state["used"] = {pid: used for pid, used in state["used"].items() if is_alive(pid)}
            for key in ("running", "waiting"):
                state[key] = [pid for pid in state[key] if is_alive(pid)]
            yield state
            opened.seek(0)
            opened.truncate()
            json.dump(state, opened)

    def acquire(self, wanted):
        """Waits until this process may use `wanted` bytes in all."""
        while True:
            with self.state() as state:
                if self.pid not in state["waiting"]:
                    state["waiting"].append(self.pid)
                others = sum(used for pid, used in state["used"].items() if pid != self.pid)
                # If no test runs, nothing is given back while this one waits.
                if state["waiting"][0] == self.pid and (others + wanted <= self.limit or not state["running"]):
                    state["waiting"].remove(self.pid)
                    state["running"].append(self.pid)
                    state["used"][self.pid] = wanted
                    return
            time.sleep(PAUSE)

    def release(self, kept):
        """Notes that the test has ended, and what the process still uses."""
        with self.state() as state:
            state["running"].remove(self.pid)
            state["used"][self.pid] = kept


class Sharing:
    """Lets the tests of this process wait for memory."""

    def __init__(self, plan, path):
        self.plan, self.is_owner = plan, path is None
        if self.is_owner:
            file, path = tempfile.mkstemp(prefix="harness-pytest-")
            os.close(file)
        self.shared = Shared(path, plan.limit)

    def pytest_unconfigure(self):
        if self.is_owner:
            os.unlink(self.shared.path)

    def pytest_report_header(self):
        return f"GPU memory: tests share {size(self.plan.limit)}; each process takes {size(self.plan.context)} of it besides its allocations"

    def pytest_report_collectionfinish(self, items):
        return list(self.plan.describe(items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput[SHARED] = self.shared.path

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        # A marked test runs on a simulated GPU.
        if not self.plan.need(item.nodeid) or item.get_closest_marker("gpu_memory"):
            yield
            return
        self.shared.acquire(self.plan.wanted(item.nodeid, self.kept()))
        try:
            yield
        finally:
            release_caches()
            self.shared.release(self.kept())

    def kept(self):
        """The bytes that this process uses."""
        torch, cupy, found = sys.modules.get("torch"), sys.modules.get("cupy"), []
        if is_initialized(torch):
            found.append(max(map(torch.cuda.memory_reserved, range(torch.cuda.device_count()))))
        if hasattr(cupy, "get_default_memory_pool"):
            found.append(cupy.get_default_memory_pool().total_bytes())
        return self.plan.context + sum(found) if any(found) or is_initialized(torch) else 0
