"""Tests of the memory of train.py. They need no GPU: the pytest plugin `harness.pytest_plugin` runs them on a simulated one."""
import runpy
from pathlib import Path

import pytest


@pytest.fixture
def train(monkeypatch):
    """Runs the script without arguments."""
    script = str(Path(__file__).with_name("train.py"))
    monkeypatch.setattr("sys.argv", [script])
    return lambda: runpy.run_path(script, run_name="__main__")


@pytest.mark.gpu_memory(memory="2GiB", max_reserved="512MiB")
def test_training_fits_in_512_mib(train, gpu_memory):
    train()
    assert gpu_memory()["ooms"] == 0


@pytest.mark.gpu_memory(memory="2GiB", faults="largest:3")
def test_training_recovers_where_much_memory_is_allocated(train):
    train()
