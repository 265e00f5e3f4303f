"""Tests of harness.observe, which writes a snapshot of each out-of-memory error."""
import os
import re
import subprocess
import sys

import pytest

PROGRAM = """
import torch
for attempt in range(3):
    try:
        kept = [torch.zeros(200 << 20, device="cuda") for _ in range(5)]
    except torch.OutOfMemoryError:
        print("out of memory", attempt)
"""


@pytest.mark.parametrize("command, variables", [(["-m", "harness.observe"], {}), ([], {"HARNESS_OBSERVE": "1"})], ids=["module", "variable"])
def test_the_last_errors_leave_snapshots_named_by_job_and_rank(tmp_path, command, variables):
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = {"HARNESS_OBSERVE_DIR": "snapshots", "HARNESS_OBSERVE_KEEP": "2", "TORCHELASTIC_RUN_ID": "job/7", "RANK": "3", "TORCHELASTIC_RESTART_COUNT": "1", **variables}
    python = ["harness", "exec", "--memory", "2GiB", "--", sys.executable, *command, "program.py"]
    result = subprocess.run(python, cwd=tmp_path, env={**os.environ, **settings}, text=True, capture_output=True, check=True)
    assert result.stdout == "out of memory 0\nout of memory 1\nout of memory 2\n"
    names = sorted(os.listdir(tmp_path / "snapshots"))
    assert [re.sub(r"-\d{8}-\d{6}-\d+-", "-", name) for name in names] == ["job_7-rank3-gpu0-restart1-2.pickle", "job_7-rank3-gpu0-restart1-3.pickle"]
    explained = subprocess.run(["harness", "explain", tmp_path / "snapshots" / names[-1]], text=True, capture_output=True, check=True).stdout
    assert "The program is too large by 352 MiB" in explained and "program.py:5" in explained
