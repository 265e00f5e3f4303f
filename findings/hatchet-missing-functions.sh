#!/usr/bin/env bash
# llnl-hatchet 2026.2.0 (https://pypi.org/project/llnl-hatchet) leaves a function that only the first of two profiles has as it is, in their
# quotient too, and makes one that only the second has NaN, in their sum too.
#
# The documentation describes the operations as column-wise over the union of both profiles. Missing functions were meant to be NaN in each result
# (https://github.com/hatchet/hatchet/pull/240). `DataFrame.update` of pandas ignores a NaN (hatchet/graphframe.py, line 1362), so a function of the
# first profile keeps its time. In a quotient, 20 s mean 20 times slower. The sum changes if the profiles change places.
#
# Seen on 1 December 2026 on x86-64 Linux, with pandas 2.3.3: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llnl-hatchet==2026.2.0 pandas==2.3.3
cat >"$folder/program.py" <<'PYTHON'
from hatchet import GraphFrame


def profile(**seconds):
    def node(name, time, children=()):
        return {"frame": {"name": name}, "metrics": {"time": time}, "children": list(children)}

    return GraphFrame.from_literal([node("step", 1.0, (node(name, time) for name, time in seconds.items()))])


def show(name, graph_frame):
    rows = zip(graph_frame.dataframe["name"], graph_frame.dataframe["time"])
    print(f"{name}:", ", ".join(f"{function} {time:g}" for function, time in sorted(rows)))


first = profile(matmul=10.0, copy=20.0)
second = profile(matmul=5.0, reduce=8.0)
show("first", first)
show("second", second)
show("first + second", first + second)
show("second + first", second + first)
show("first - second", first - second)
show("first / second", first / second)
PYTHON
seen=$("$folder/venv/bin/python" -W ignore "$folder/program.py")
expected='first: copy 20, matmul 10, step 1
second: matmul 5, reduce 8, step 1
first + second: copy 20, matmul 15, reduce nan, step 2
second + first: copy nan, matmul 15, reduce 8, step 2
first - second: copy 20, matmul 5, reduce nan, step 0
first / second: copy 20, matmul 2, reduce nan, step 1'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
