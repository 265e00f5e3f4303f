"""`%%gpu_memory` of IPython and Jupyter."""
from __future__ import annotations

from typing import Any

from harness.recording import record


def register(ipython: Any) -> None:
    def gpu_memory(line: str, cell: str) -> None:
        """Runs the cell, and shows where its GPU memory was: at an out-of-memory error, or else at the peak.

        `%%gpu_memory FILE` also keeps the snapshot.
        """
        from IPython.display import display

        with record(line.strip() or None) as recorded:
            # Shows the traceback of an error.
            ipython.run_cell(cell)
        if recorded.used_gpu:
            display(recorded.explanation)
        else:
            print("The cell used no memory of a GPU.")

    ipython.register_magic_function(gpu_memory, "cell", "gpu_memory")
