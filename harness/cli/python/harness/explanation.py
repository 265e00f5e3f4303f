"""`harness.explain`: where the memory of a snapshot was, and why a request failed."""
from __future__ import annotations

import html
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Union

Size = Union[int, str]
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class HarnessError(Exception):
    """The program `harness` is missing, or refuses the snapshot. The text is its message."""


@dataclass(frozen=True)
class Site:
    """A line of the program."""

    name: str
    """As in `train.py:21 step`."""
    bytes: int
    blocks: Optional[int]


@dataclass(frozen=True)
class Cause:
    """A part of the device's memory. The bytes of all causes add up to `Explanation.device_total`."""

    name: str
    """As in `allocated`, `inactive_split` or `free`."""
    about: str
    """As in `free, but pinned by live blocks`."""
    bytes: int
    sites: tuple[Site, ...]
    """The lines with most bytes, in falling order."""


@dataclass(frozen=True)
class Category:
    """Allocated memory by purpose, as in `activations`."""

    name: str
    about: str
    bytes: int
    peak_bytes: int
    """At the peak of allocated memory."""


@dataclass(frozen=True)
class Explanation:
    """The memory of one device at one moment: the failed request, or else the end or the peak. All sizes are bytes."""

    snapshot: Path
    document: dict[str, Any]
    """The whole result, as `harness explain --format json` prints it."""
    text: str
    """The result as text, as `harness explain` prints it."""
    _given: tuple[str, ...] = field(default=(), repr=False)
    """The options of `harness explain` without the device."""
    _folder: Any = field(default=None, repr=False, compare=False)
    """The temporary folder of a `Recording`, which exists as long as this object."""

    @property
    def headline(self) -> str:
        """The main sentence."""
        return self.document["headline"]

    @property
    def is_out_of_memory(self) -> bool:
        return self.document.get("request") is not None

    @property
    def requested(self) -> Optional[int]:
        """Bytes of the failed request; None if no request failed."""
        request = self.document.get("request")
        return request and request["requested"]

    @property
    def allocated(self) -> int:
        return self.document["accounts"]["allocated"]

    @property
    def reserved(self) -> int:
        return self.document["accounts"]["reserved"]

    @property
    def device_total(self) -> int:
        return self.document["device_total"]

    @property
    def causes(self) -> tuple[Cause, ...]:
        return tuple(
            Cause(cause["cause"], cause["about"], cause["bytes"], tuple(Site(site["site"], site["bytes"], site.get("blocks")) for site in cause["sites"]))
            for cause in self.document["causes"]
        )

    @property
    def categories(self) -> tuple[Category, ...]:
        """Empty if the recording has no stacks."""
        return tuple(
            Category(category["category"], category["about"], category["bytes"], category["peak_bytes"]) for category in self.document["categories"]
        )

    def page(self, path: Union[str, os.PathLike[str]]) -> Path:
        """Writes the page with timeline, segments and flame graph, and returns its path. The page needs no network."""
        run("explain", *self._given, f"--device={self.document['device']}", "--format=html", f"--out={os.fspath(path)}", "--", str(self.snapshot))
        return Path(path)

    def __str__(self) -> str:
        return self.text

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        """How IPython shows it in a terminal."""
        printer.text(self.text)

    def _repr_html_(self) -> str:
        kind = "Out of memory" if self.is_out_of_memory else "No request failed"
        parts = [f"<p><b>{kind}.</b> {html.escape(self.headline)}</p>"]
        share = max(self.device_total, 1)
        causes = [
            (size(cause.bytes), f"{cause.bytes / share:.1%}", cause.about, largest(cause.sites)) for cause in self.causes
        ]
        parts.append(table(f"Where the {size(self.device_total)} are", ("bytes", "share", "what", "most of it"), causes))
        categories = [(size(category.bytes), size(category.peak_bytes), category.about) for category in self.categories]
        if categories:
            parts.append(table("What the allocated memory is for", ("bytes", "at the peak", "what"), categories))
        return "\n".join(parts)


def explain(
    snapshot: Union[str, os.PathLike[str]],
    *,
    memory: Optional[Size] = None,
    at: Union[str, int, None] = None,
    device: Optional[int] = None,
    categories: Union[str, os.PathLike[str], None] = None,
) -> Explanation:
    """Explains a memory snapshot of PyTorch, plain or compressed with gzip.

    memory: the device's memory, in bytes or as in "80GiB" [default: the reserved memory plus the free memory at a refused request].
    at: the moment: "oom", "peak", "end" or the index of an event, from 0 [default: the out-of-memory error, else the end].
    device: the index of the device [default: the one that ran out of memory, else the one with the most reserved memory].
    categories: a YAML file with categories of your own.

    Raises HarnessError with the program's message if the snapshot cannot be read.
    """
    if os.path.isdir(snapshot):
        raise HarnessError(f"`{os.fspath(snapshot)}` is a folder: expected one snapshot, as in `{os.path.join(snapshot, 'rank0.pickle')}`")
    memory = f"{memory}B" if isinstance(memory, int) else memory
    options = {"--memory": memory, "--at": at, "--categories": categories and os.fspath(categories)}
    given = tuple(f"{name}={value}" for name, value in options.items() if value is not None)
    words = [*given, *([] if device is None else [f"--device={device}"])]
    document = json.loads(run("explain", *words, "--format=json", "--", os.fspath(snapshot)))
    if device is None and "snapshots" in document:
        # Several devices. The one with the failed request is explained, as on the command line.
        chosen = max(document["snapshots"], key=lambda one: (one.get("request") is not None, one["accounts"]["reserved"], -one["device"]))
        return explain(snapshot, memory=memory, at=at, device=chosen["device"], categories=categories)
    return Explanation(Path(snapshot), document, run("explain", *words, "--", os.fspath(snapshot)), given)


def program() -> str:
    """The path of the program: next to this Python, or in PATH."""
    beside = Path(sys.executable).with_name("harness")
    found = str(beside) if beside.exists() else shutil.which("harness")
    if not found:
        raise HarnessError("there is no program `harness` next to this Python or in PATH: install the package gpu-oom-harness")
    return found


def run(*arguments: str) -> str:
    ended = subprocess.run([program(), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if ended.returncode:
        raise HarnessError(ended.stderr.strip() or f"harness ended with exit code {ended.returncode}")
    return ended.stdout


def size(amount: float) -> str:
    """As in `1.50 GiB`, rounded to two places."""
    unit = 0
    while amount >= 1024 and unit + 1 < len(UNITS):
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.0f} B" if unit == 0 else f"{amount:.2f} {UNITS[unit]}"


def largest(sites: tuple[Site, ...]) -> str:
    more = [f"{len(sites) - 2} more"] if len(sites) > 2 else []
    return "; ".join([f"{size(site.bytes)} {site.name}" for site in sites[:2]] + more)


def table(caption: str, heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    def cells(kind: str, row: tuple[str, ...]) -> str:
        return "<tr>" + "".join(f"<{kind} style='text-align:left'>{html.escape(cell)}</{kind}>" for cell in row) + "</tr>"

    lines = "\n".join(cells("td", row) for row in rows)
    return f"<table>\n<caption>{html.escape(caption)}</caption>\n{cells('th', heads)}\n{lines}\n</table>"
