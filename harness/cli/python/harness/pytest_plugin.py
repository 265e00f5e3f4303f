"""Runs tests on a simulated GPU: @pytest.mark.gpu_memory(memory="24GiB", max_reserved="20GiB").

Each marked test runs alone in a child process, `harness exec -- python -m pytest NODE`, which writes its reports and a memory snapshot for the parent.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

REPORTS = "HARNESS_PYTEST_REPORTS"
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# The keyword arguments of the mark that are options of `harness exec`.
OPTIONS = ("gpu", "memory", "devices", "context_overhead", "values", "alloc_conf", "fail")
MARK = """gpu_memory(memory, gpu, devices, values, alloc_conf, max_allocated, max_reserved, baseline, faults): run the test on a simulated GPU. \
max_allocated and max_reserved limit the peaks; baseline names a file with the exact figures; faults="sample:8" repeats the test and fails an \
allocation each time, which it must survive"""


class Invalid(Exception):
    """A mark or an environment that cannot be used."""


def pytest_addoption(parser):
    group = parser.getgroup("gpu_memory", "tests on a simulated GPU")
    group.addoption("--gpu-memory-harness", metavar="PROGRAM", help="the program `harness` [default: next to this Python, or in PATH]")
    group.addoption("--gpu-memory-update", action="store_true", help="write the baselines of the mark gpu_memory instead of comparing with them")


def pytest_configure(config):
    config.addinivalue_line("markers", MARK)
    if REPORTS in os.environ:
        config.pluginmanager.register(Child(config, Path(os.environ[REPORTS])))


class Child:
    """Writes the reports of the child's test, one per line."""

    def __init__(self, config, file):
        self.config, self.file = config, file

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        with self.file.open("a") as file:
            print(json.dumps(data), file=file)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    mark = item.get_closest_marker("gpu_memory")
    if mark is None or REPORTS in os.environ:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    try:
        reports = run(item, mark)
    except Invalid as error:
        reports = [failure(item, str(error))]
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def run(item, mark):
    """Runs the test in a child process and returns its reports."""
    program = harness(item.config)
    options, limits = arguments(mark)
    if "baseline" in mark.kwargs:
        options += ["--baseline", str(item.path.parent / mark.kwargs["baseline"])]
        options += ["--update"] if item.config.getoption("--gpu-memory-update") else []
    with tempfile.TemporaryDirectory(prefix="harness-pytest-") as folder:
        reports, record, snapshot = (Path(folder) / name for name in ("reports", "record.json", "snapshot.pickle"))
        if not any(option.startswith("--every-fault") for option in options):
            options += ["--record", str(record), "--snapshot", str(snapshot)]
        plugins = ["-p", __name__, "-p", "no:xdist", "-p", "no:cacheprovider"]
        test = [sys.executable, "-m", "pytest", "-q", *plugins, f"--rootdir={item.config.rootpath}"]
        command = [program, "exec", *options, "--", *test, item.nodeid]
        environment = {**os.environ, REPORTS: str(reports), "PYTEST_ADDOPTS": ""}
        done = subprocess.run(command, env=environment, cwd=item.config.rootpath, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        found = []
        for line in reports.read_text().splitlines() if reports.exists() else []:
            found.append(item.config.hook.pytest_report_from_serializable(config=item.config, data=json.loads(line)))
            if found[-1].when == "teardown":
                # The reports of runs with injected failures follow.
                break
        if not found:
            return [failure(item, f"the test did not start on the simulated GPU:\n{done.stdout}")]
        failed = next((report for report in found if report.failed), None)
        problem = None
        if failed and snapshot.exists() and "OutOfMemoryError" in failed.longreprtext:
            explained = subprocess.run([program, "explain", str(snapshot)], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            failed.sections.append(("GPU memory", explained.stdout))
        elif not failed and done.returncode:
            # What pytest printed in the child comes first.
            problem = done.stdout[max(0, done.stdout.find("baseline: "), done.stdout.find("The program ")) :].strip()
        elif not failed and record.exists():
            problem = above(json.loads(record.read_text()), limits)
        if problem:
            # pytest-xdist expects one report of the call.
            found = [report for report in found if report.when != "call"] + [failure(item, problem)]
        return found


def arguments(mark):
    """Returns the options of `harness exec` and the limits of a mark."""
    if mark.args:
        raise Invalid("the mark gpu_memory takes keyword arguments only, as in gpu_memory(memory='24GiB')")
    options, limits = [], {}
    for name, value in mark.kwargs.items():
        if name in OPTIONS:
            options += [f"--{name.replace('_', '-')}", str(value)]
        elif name == "faults":
            options += [f"--every-fault={value}", "--expect", "recovers"]
        elif name in ("max_allocated", "max_reserved"):
            limits[name.removeprefix("max_")] = size(name, value)
        elif name != "baseline":
            known = ", ".join((*OPTIONS, "faults", "baseline", "max_allocated", "max_reserved"))
            raise Invalid(f"the mark gpu_memory has no argument `{name}`: it takes {known}")
    if limits and "faults" in mark.kwargs:
        raise Invalid("faults with max_allocated or max_reserved: the peaks belong to a run without failures, so write two tests")
    return options, limits


def size(name, value):
    """Returns the bytes of a size such as 20GiB, or of a number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB|B)", str(value))
    if isinstance(value, int):
        return value
    if not match:
        raise Invalid(f"{name}={value!r} is not a size: write a number of bytes, or '20GiB'")
    return int(float(match[1]) * UNITS[match[2]])


def above(record, limits):
    """Returns a line for each limit that the highest peak of all devices exceeds."""
    statistics = [device for process in record["processes"] for device in ((process["torch"] or {}).get("memory_stats") or {}).values()]
    lines = []
    for name, limit in limits.items():
        peak = max((device[f"{name}_bytes.all.peak"] for device in statistics), default=None)
        if peak is None:
            lines.append(f"max_{name}: the test did not use the GPU")
        elif peak > limit:
            lines.append(f"peak {name} is {text(peak)}, and max_{name} is {text(limit)}")
    return "\n".join(lines)


def text(size):
    unit = next(unit for unit in ("TiB", "GiB", "MiB", "KiB", "B") if size >= UNITS[unit] or unit == "B")
    return f"{size / UNITS[unit]:.2f} {unit} ({size} bytes)"


def harness(config):
    beside = Path(sys.executable).with_name("harness")
    program = config.getoption("--gpu-memory-harness") or (str(beside) if beside.exists() else shutil.which("harness"))
    if not program:
        raise Invalid("the program `harness` is not installed: install the wheel into this environment, or name it with --gpu-memory-harness")
    return program


def failure(item, message):
    return pytest.TestReport(item.nodeid, item.location, {name: 1 for name in item.keywords}, "failed", message, "call")


@pytest.fixture
def gpu_memory():
    """The memory of this process on GPU 0 so far: `gpu_memory()` returns allocated, reserved, their peaks, retries and OOMs."""
    import torch

    def figures(device=0):
        statistics = torch.cuda.memory_stats(device)
        return {
            "allocated": statistics["allocated_bytes.all.current"],
            "reserved": statistics["reserved_bytes.all.current"],
            "peak_allocated": statistics["allocated_bytes.all.peak"],
            "peak_reserved": statistics["reserved_bytes.all.peak"],
            "retries": statistics["num_alloc_retries"],
            "ooms": statistics["num_ooms"],
        }

    return figures
