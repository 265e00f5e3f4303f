"""`harness.record`: the memory of a part of a program."""
from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any, Iterator, Optional, Union

from harness.explanation import Explanation, explain

# PyTorch's observers of out-of-memory errors cannot be removed, so there is one, for the innermost recording.
_open: list[Recording] = []
_observes = False


class Recording:
    """A recording of `record`. After its block, `snapshot` names the file and `explanation` explains it."""

    def __init__(self, path: Union[str, os.PathLike[str], None]):
        self._folder = None if path else tempfile.TemporaryDirectory(prefix="harness-")
        self.snapshot: Path = Path(path or os.path.join(self._folder.name, "snapshot.pickle"))
        """The file of the snapshot. Without a path from the caller, it exists as long as this object."""
        self.is_out_of_memory = False
        """Whether an out-of-memory error happened in the block. The snapshot then shows the last one."""
        self.used_gpu = False
        """Whether the process had memory of a GPU in the block. If not, there is no explanation."""
        self._explanation: Optional[Explanation] = None

    @property
    def explanation(self) -> Explanation:
        """The memory at the last out-of-memory error, or else at the peak of allocated memory in the block."""
        if not self.used_gpu:
            raise ValueError("nothing is recorded: the block has not ended, or used no memory of a GPU")
        if self._explanation is None:
            self._explanation = explain(self.snapshot, at=None if self.is_out_of_memory else "peak")
        return self._explanation

    def _write(self, torch: Any) -> None:
        snapshot = torch.cuda.memory._snapshot()
        with open(self.snapshot, "wb") as file:
            pickle.dump(snapshot, file)
        self.used_gpu = bool(snapshot["segments"]) or any(snapshot["device_traces"])


@contextlib.contextmanager
def record(path: Union[str, os.PathLike[str], None] = None, *, events: int = 100_000) -> Iterator[Recording]:
    """Records allocations and frees on all GPUs in a `with` block, with their Python stacks.

    path: the file for the snapshot [default: a temporary file].
    events: allocations and frees to remember; of more, the first are forgotten.

    An error of the block passes through. PyTorch has one history per process, so the block ends a recording that the program began before, except for
    one of `harness.observe`.
    """
    import torch

    recording = Recording(path)
    is_observed = hasattr(torch, "_harness_observer")
    if torch.cuda.is_available():
        torch.cuda.init()
        _observe(torch)
        if not is_observed:
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=events)
    _open.append(recording)
    try:
        yield recording
    finally:
        _open.remove(recording)
        if torch.cuda.is_initialized():
            if not recording.is_out_of_memory:
                recording._write(torch)
            if not is_observed and not _open:
                torch.cuda.memory._record_memory_history(enabled=None)


def _observe(torch: Any) -> None:
    global _observes
    if _observes:
        return
    _observes = True

    def write(*_: Any) -> None:
        # An error here would replace the program's out-of-memory error.
        with contextlib.suppress(Exception):
            if _open:
                _open[-1]._write(torch)
                _open[-1].is_out_of_memory = True

    torch._C._cuda_attach_out_of_memory_observer(write)
