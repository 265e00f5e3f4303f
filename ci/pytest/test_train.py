"""train.py recovers from running out of memory, whichever of its allocations it hits. Needs no GPU: the GPU is simulated."""
import subprocess
import sys
from pathlib import Path


def test_training_recovers_wherever_memory_runs_out():
    harness = ["harness", "exec", "--memory", "2GiB", "--every-fault", "--expect", "recovers", "--"]
    result = subprocess.run([*harness, sys.executable, Path(__file__).with_name("train.py")])
    assert result.returncode == 0, "an allocation that fails is not recovered from: the table above names its line"
