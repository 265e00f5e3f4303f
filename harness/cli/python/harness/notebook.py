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
            result = ipython.run_cell(cell)
        if recorded.used_gpu:
            display(recorded.explanation)
        else:
            print("The cell used no memory of a GPU.")
        if not result.success:
            hide_traceback(ipython, result.error_before_exec or result.error_in_exec)
            result.raise_error()

    ipython.register_magic_function(gpu_memory, "cell", "gpu_memory")


def hide_traceback(ipython: Any, error: BaseException) -> None:
    """Does not show the next traceback if it is that of an error which has been shown."""
    show = ipython._showtraceback

    def show_others(kind: Any, value: Any, lines: Any) -> None:
        del ipython._showtraceback
        if value is not error:
            show(kind, value, lines)

    ipython._showtraceback = show_others
