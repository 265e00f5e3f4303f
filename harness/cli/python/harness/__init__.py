"""Memory of PyTorch programs, explained in Python and in notebooks.

    import harness
    harness.explain("oom.pickle")          # in a notebook: figures and causes as tables

    with harness.record() as recorded:     # in a program
        train()
    print(recorded.explanation)

    %load_ext harness                      # in a notebook
    %%gpu_memory                           # as the first line of a cell

The package also has the pytest plugin `harness.pytest_plugin`, and `harness.observe`, whose import writes a snapshot at every out-of-memory error.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Category", "Cause", "Explanation", "HarnessError", "Recording", "Site", "explain", "load_ipython_extension", "record"]

if TYPE_CHECKING:
    from harness.explanation import Category, Cause, Explanation, HarnessError, Site, explain
    from harness.recording import Recording, record

_MODULES = {"Recording": "recording", "record": "recording"}


def __getattr__(name: str) -> Any:
    """Imports on first use, because the pytest plugin and the observer need none of it."""
    if name not in __all__:
        raise AttributeError(f"module `harness` has no attribute `{name}`")
    from importlib import import_module

    return getattr(import_module(f"harness.{_MODULES.get(name, 'explanation')}"), name)


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext harness` in IPython and Jupyter: adds `%%gpu_memory`."""
    from harness.notebook import register

    register(ipython)
