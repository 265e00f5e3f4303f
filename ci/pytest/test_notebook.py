"""`harness.explain` and `harness.record` in a program, and `%%gpu_memory` in a notebook, all on the simulated GPU."""
import os
import subprocess
import sys

import pytest

PROGRAM = """
import harness, torch
try:
    with harness.record() as recorded:
        kept = [torch.empty(400 << 20, dtype=torch.uint8, device="cuda") for _ in range(3)]
except torch.OutOfMemoryError:
    pass
found = recorded.explanation
assert recorded.is_out_of_memory and found.is_out_of_memory, found
assert found.requested == 400 << 20 and found.device_total == 1 << 30, found.document
assert sum(cause.bytes for cause in found.causes) == found.device_total
assert found.causes[0].sites[0].name.startswith("program.py:5"), found.causes
with harness.record("peak.pickle") as recorded:
    torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
found = recorded.explanation
assert not found.is_out_of_memory and found.allocated >= 100 << 20, found.document["accounts"]
assert harness.explain("peak.pickle", at="peak").document["causes"] == found.document["causes"]
print(found.page("peak.html").stat().st_size)
"""
PERIODS = """
import harness, torch

def new(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

big = new(700)
del big
torch.cuda.empty_cache()
kept = new(100)
with harness.record() as outer:
    x = new(400)
    del x
    with harness.record(events=5) as inner:
        y = new(10)
        del y
    with harness.record() as idle:
        pass
peaks = [recorded.explanation.allocated >> 20 for recorded in (outer, inner, idle)]
assert peaks == [500, 110, 100], peaks
for events in range(1, 9):
    with harness.record(events=events) as outer:
        for _ in range(4):
            x = new(400)
            del x
        with harness.record() as inner:
            y = new(10)
    del y
    # The history is full: the block's own allocation is its last event.
    assert inner.explanation.allocated >> 20 == 110, (events, inner.explanation.allocated)
with harness.record() as outer:
    try:
        with harness.record() as inner:
            new(2 << 10)
    except torch.OutOfMemoryError:
        pass
    with harness.record() as later:
        new(10)
failed = [recorded.is_out_of_memory for recorded in (outer, inner, later)]
assert failed == [True, True, False], failed
assert outer.explanation.requested == 2 << 30 and later.explanation.requested is None
"""
PATHS = """
import harness, torch

def recorded():
    with harness.record() as recorded:
        torch.empty(10 << 20, dtype=torch.uint8, device="cuda")
    return recorded

with harness.record() as idle:
    pass
assert not idle.used_gpu
found = recorded().explanation
assert found.page("page.html").exists()
try:
    with harness.record("missing/snapshot.pickle"):
        raise AssertionError("the block ran")
except FileNotFoundError:
    pass
import os, warnings
os.mkdir("folder")
with warnings.catch_warnings(record=True) as warned:
    try:
        with harness.record("folder/snapshot.pickle"):
            torch.empty(1 << 20, device="cuda")
            os.rmdir("folder")
            raise KeyError("of the block")
    except KeyError:
        pass
assert "folder/snapshot.pickle" in str(warned[0].message), warned
torch.empty(1 << 20, device="cuda")
assert not any(torch.cuda.memory._snapshot()["device_traces"]), "the history is on"
"""
VALUES = """
import harness, torch
model = torch.nn.Linear(1000, 1000, device="cuda")
with harness.record("recorded.pickle") as recorded:
    y = model(torch.ones(1000, 1000, device="cuda"))
explained = recorded.explanation
sites = {site.name for cause in explained.causes for site in cause.sites}
assert sites == {"before the recording", "program.py:5"}, sites
parameters = [category.bytes for category in explained.categories if category.name == "parameters"]
assert parameters and parameters[0] >= 4_000_000, explained.categories
"""
OF_EXEC = """
import harness, torch

def step(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

a = step(100)
with harness.record() as recorded:
    b = step(50)
c = step(200)
assert recorded.explanation.allocated == 150 << 20
try:
    step(2 << 10)
except torch.OutOfMemoryError:
    pass
"""
RUN = """
import nbclient, nbformat
notebook = nbformat.read("cells.ipynb", 4)
nbclient.NotebookClient(notebook, allow_errors=True).execute()
nbformat.write(notebook, "cells.ipynb")
"""


def exec_python(folder, *arguments, options=(), **variables):
    command = ["harness", "exec", "--quiet", "--memory", "1GiB", *options, "--", sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True)


def exec_program(folder, program, **given):
    (folder / "program.py").write_text(program)
    ended = exec_python(folder, "program.py", **given)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_block_is_recorded_and_explained(tmp_path):
    assert int(exec_program(tmp_path, PROGRAM)) > 10_000 and (tmp_path / "peak.html").exists()


@pytest.mark.parametrize("observed", ["0", "1"])
def test_a_block_within_another_recording_has_its_own_peak_and_errors(tmp_path, observed):
    exec_program(tmp_path, PERIODS, HARNESS_OBSERVE=observed, HARNESS_OBSERVE_DIR="observed")


def test_a_missing_folder_is_found_first_and_a_vanished_one_keeps_the_error_of_its_block(tmp_path):
    exec_program(tmp_path, PATHS)


def test_with_values_the_lines_are_those_of_the_program_and_tensors_have_categories(tmp_path):
    exec_program(tmp_path, VALUES, options=["--values", "cpu"])


def test_a_block_leaves_the_recording_of_exec_on(tmp_path):
    exec_program(tmp_path, OF_EXEC, options=["--snapshot", "exec.pickle", "--baseline", "peaks.json", "--update"])
    peaks = (tmp_path / "peaks.json").read_text()
    assert f'"program.py:5 step": {350 << 20}' in peaks, peaks
    explained = subprocess.run(["harness", "explain", "exec.pickle"], cwd=tmp_path, text=True, capture_output=True, check=True).stdout
    assert "350 MiB" in explained and "program.py:5 step" in explained, explained


def with_jupyter():
    for name in ("nbclient", "ipykernel"):
        pytest.importorskip(name, reason=f"needs {name}")
    return pytest.importorskip("nbformat", reason="needs nbformat")


def test_a_notebook_stops_at_the_error_of_a_cell(tmp_path):
    nbformat = with_jupyter()
    cells = ["%load_ext harness", "%%gpu_memory\n1/0", "print('went on')"]
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells]), tmp_path / "cells.ipynb")
    ended = exec_python(tmp_path, "-c", RUN.replace("allow_errors=True", "allow_errors=False"))
    assert "nbclient.exceptions.CellExecutionError" in ended.stderr and "ZeroDivisionError" in ended.stderr, ended.stderr


def test_a_cell_shows_where_its_memory_was(tmp_path):
    nbformat = with_jupyter()
    cells = [
        "%load_ext harness\nimport torch",
        "%%gpu_memory\nx = torch.empty(100 << 20, dtype=torch.uint8, device='cuda')",
        "%%gpu_memory cell.pickle\ny = torch.empty(2 << 30, dtype=torch.uint8, device='cuda')",
        "x.numel()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(notebook, tmp_path / "cells.ipynb")
    ended = exec_python(tmp_path, "-c", RUN)
    assert ended.returncode == 0, ended.stderr
    done = nbformat.read(tmp_path / "cells.ipynb", as_version=4)
    peak, failed, last = (cell.outputs for cell in done.cells[1:])
    assert "100.00 MiB" in peak[-1].data["text/html"] and "100 MiB are allocated" in peak[-1].data["text/plain"], peak
    assert failed[0].output_type == "error" and failed[0].ename == "OutOfMemoryError", failed
    assert [output.output_type for output in failed].count("error") == 1 and failed[0].traceback, failed
    assert "Out of memory.</b>" in failed[-1].data["text/html"], failed
    # The cell ran in the notebook's own namespace.
    assert last[0].data["text/plain"] == str(100 << 20), last
    assert (tmp_path / "cell.pickle").exists()
