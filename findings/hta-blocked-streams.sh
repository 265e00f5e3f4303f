#!/usr/bin/env bash
# HolisticTraceAnalysis 0.5.0 (https://pypi.org/project/HolisticTraceAnalysis) returns the time on a full launch queue for only one stream of a rank, and
# reports 20 GB/s for two copies of 10 GB/s that follow each other, without an error.
#
# `get_time_spent_blocked_on_full_queue` documents the time of each stream and rank. Its result has the rank as its key (hta/analyzers/trace_counters.py,
# line 245), so a later stream replaces an earlier one. For the bandwidth, the start of a copy adds to a sum, and its end subtracts. At the same
# time, the start comes first (line 312), so the maximum has both copies. With a gap of 1 us, it is right.
#
# The trace below has six launches for each stream. Each queue has at least four kernels for 497 us, and the limit is four.
#
# Seen on 1 December 2026 on x86-64 Linux: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check HolisticTraceAnalysis==0.5.0
cat >"$folder/program.py" <<'PYTHON'
import json
import logging
import pathlib
import sys

from hta.trace_analysis import TraceAnalysis

logging.disable()


def analyze(name, streams, gap):
    events = []

    def add(category, title, start, duration, thread, **arguments):
        events.append(dict(ph="X", cat=category, name=title, ts=start, dur=duration, pid=0, tid=thread, args=arguments))

    add("user_annotation", "ProfilerStep#1", 1000, 1200, 1)
    for stream in streams:
        for kernel in range(6):
            link = 100 * stream + kernel
            add("cuda_runtime", "cudaLaunchKernel", 1000 + kernel, 1, stream, correlation=link)
            add("kernel", "gemm", 1100 + 200 * kernel, 200, stream, stream=stream, correlation=link, device=0)
    for copy in range(2):
        link = 10000 + copy
        add("cuda_runtime", "cudaMemcpyAsync", 1010 + copy, 1, 1, correlation=link)
        bandwidth = {"memory bandwidth (GB/s)": 10.0, "bytes": 1000000}
        add("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1100 + (100 + gap) * copy, 100, 30, stream=30, correlation=link, device=0, **bandwidth)
    directory = pathlib.Path(sys.argv[1], name)
    directory.mkdir()
    trace = {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}
    (directory / "rank0.json").write_text(json.dumps(trace))
    return TraceAnalysis(trace_dir=str(directory))


for streams in ([7], [20], [7, 20]):
    analysis = analyze("-".join(map(str, streams)), streams, 1)
    queues = analysis.get_queue_length_time_series()
    full = analysis.get_time_spent_blocked_on_full_queue(queues, max_queue_length=4)
    rows = [f"stream {row.stream} {row.duration_at_max_queue_length} us" for row in full.itertuples()]
    print(f"= streams {streams}:", *rows)
for gap in (1, 0):
    summary = analyze(f"gap{gap}", [7], gap).get_memory_bw_summary()
    print(f"= gap of {gap} us: largest bandwidth {summary[('memory_bw_gbps', 'max')].max()} GB/s")
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py" "$folder" 2>/dev/null | sed -n 's/^= //p')
expected='streams [7]: stream 7 497.0 us
streams [20]: stream 20 497.0 us
streams [7, 20]: stream 20 497.0 us
gap of 1 us: largest bandwidth 10.0 GB/s
gap of 0 us: largest bandwidth 20.0 GB/s'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
