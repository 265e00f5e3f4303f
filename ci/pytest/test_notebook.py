"""`harness.explain` and `harness.record` in a program, and `%%gpu_memory` in a notebook, all on the simulated GPU."""
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
RUN = """
import nbclient, nbformat
notebook = nbformat.read("cells.ipynb", 4)
nbclient.NotebookClient(notebook, allow_errors=True).execute()
nbformat.write(notebook, "cells.ipynb")
"""


def exec_python(folder, *arguments):
    command = ["harness", "exec", "--quiet", "--memory", "1GiB", "--", sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_a_block_is_recorded_and_explained(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = exec_python(tmp_path, "program.py")
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 10_000 and (tmp_path / "peak.html").exists()


def test_a_cell_shows_where_its_memory_was(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    pytest.importorskip("nbclient", reason="needs nbclient")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
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
    assert "100.00 MiB" in peak[-1].data["text/html"], peak
    assert failed[0].output_type == "error" and failed[0].ename == "OutOfMemoryError", failed
    assert "Out of memory.</b>" in failed[-1].data["text/html"], failed
    # The cell ran in the notebook's own namespace.
    assert last[0].data["text/plain"] == str(100 << 20), last
    assert (tmp_path / "cell.pickle").exists()
