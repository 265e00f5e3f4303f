"""`harness.record`: the memory of a part of a program."""
from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import tempfile
import warnings
from pathlib import Path
from typing import Any, Iterator, Optional, Union

from harness.explanation import Explanation, explain
from harness.snapshot import take

# PyTorch's observers of out-of-memory errors cannot be removed, so there is one, for all open recordings.
_open: list[Recording] = []
_observes = False


class Recording:
    """A recording of `record`. After its block, `snapshot` names the file and `explanation` explains it."""

    def __init__(self, path: Union[str, os.PathLike[str], None]):
        self._folder = None if path else tempfile.TemporaryDirectory(prefix="harness-")
        self.snapshot: Path = Path(path or os.path.join(self._folder.name, "snapshot.pickle"))
        """The file of the snapshot. Without a path from the caller, it exists as long as this object or its explanation."""
        self.is_out_of_memory = False
        """Whether an out-of-memory error happened in the block. The snapshot then shows the last one."""
        self.used_gpu = False
        """Whether the process had memory of a GPU in the block. If not, there is no explanation."""
        self._explanation: Optional[Explanation] = None
        # For each device, the events before the block: their number, and the last one.
        self._before: list[tuple[int, Any]] = []
        is_new = not self.snapshot.exists()
        self.snapshot.open("ab").close()
        if is_new:
            self.snapshot.unlink()

    @property
    def explanation(self) -> Explanation:
        """The memory at the last out-of-memory error, or else at the peak of allocated memory in the block."""
        if not self.used_gpu:
            raise ValueError("nothing is recorded: the block has not ended, or used no memory of a GPU")
        if self._explanation is None:
            found = explain(self.snapshot, at=None if self.is_out_of_memory else "peak")
            self._explanation = dataclasses.replace(found, _folder=self._folder)
        return self._explanation

    def _begin(self, torch: Any) -> None:
        traces = torch.cuda.memory._snapshot()["device_traces"]
        self._before = [(len(trace), trace[-1] if trace else None) for trace in traces]

    def _write(self, snapshot: dict[str, Any]) -> None:
        traces = [trace[_first(trace, *before) :] for trace, before in zip(snapshot["device_traces"], self._before)]
        with open(self.snapshot, "wb") as file:
            pickle.dump({**snapshot, "device_traces": traces}, file)
        # PyTorch notes each snapshot as an event.
        self.used_gpu = bool(snapshot["segments"]) or any(event["action"] != "snapshot" for trace in traces for event in trace)

    def _end(self, torch: Any) -> None:
        try:
            if self._before and not self.is_out_of_memory:
                snapshot, problems = take(torch)
                self._write(snapshot)
                for problem in problems:
                    warnings.warn(f"harness.record: {problem}")
        finally:
            if self._before and not _open and not _is_recorded(torch):
                torch.cuda.memory._record_memory_history(enabled=None)


def _first(trace: list[Any], length: int, last: Any) -> int:
    """The index of the first event after the given number of events. A full history has forgotten its first events, and then their last one is searched."""
    if length == 0 or trace[length - 1 : length] == [last]:
        return length
    return next((index + 1 for index in reversed(range(min(length, len(trace)))) if trace[index] == last), 0)


@contextlib.contextmanager
def record(path: Union[str, os.PathLike[str], None] = None, *, events: int = 100_000) -> Iterator[Recording]:
    """Records allocations and frees on all GPUs in a `with` block, with their Python stacks.

    path: the file for the snapshot [default: a temporary file].
    events: allocations and frees to remember; of more, the first are forgotten.

    An error of the block passes through. PyTorch has one history per process, so the block ends a recording that the program began before. The block uses
    a recording of another block around it, of `harness.observe` or of `harness exec`, and lets it go on; `events` then has no effect.
    """
    import torch

    recording = Recording(path)
    if torch.cuda.is_available():
        torch.cuda.init()
        _observe(torch)
        if not _open and not _is_recorded(torch):
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=events)
        recording._begin(torch)
    _open.append(recording)
    try:
        try:
            yield recording
        finally:
            _open.remove(recording)
    except BaseException:
        try:
            recording._end(torch)
        except Exception as error:
            warnings.warn(f"harness.record: no snapshot: {error}")
        raise
    recording._end(torch)


def _is_recorded(torch: Any) -> bool:
    """Whether `harness.observe` or `harness exec` records the history."""
    return hasattr(torch, "_harness_observer") or hasattr(torch, "_harness_records")


def _observe(torch: Any) -> None:
    global _observes
    if _observes:
        return
    _observes = True

    def write(*_: Any) -> None:
        # An error here would replace the program's out-of-memory error.
        with contextlib.suppress(Exception):
            snapshot, _ = take(torch) if _open else ({}, [])
            for recording in list(_open):
                with contextlib.suppress(Exception):
                    recording._write(snapshot)
                    recording.is_out_of_memory = True

    torch._C._cuda_attach_out_of_memory_observer(write)
