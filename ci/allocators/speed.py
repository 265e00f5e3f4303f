"""Times the allocators of TensorFlow and RMM beside ours, on the traces of the suite `traces`, and prints how many times as fast ours are.

    python3 ci/allocators/speed.py [BUDGET]

HARNESS is the program, built with the profile `dist`; else target/dist/harness. Needs what record.py needs, and the time BUDGET (60s).

Each real allocator is a library that speed.cpp makes, and one arm of a suite. Its process measures the time of its functions alone. RMM's events take no
time there, but those of our allocators do."""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from record import CACHE, HERE, PINNED, installed

HARNESS = Path(os.environ.get("HARNESS", HERE.parent.parent / "target/dist/harness")).resolve()
TRACES = HERE.parent.parent / "scenarios/bench/traces"
# Our allocator, and the definition that chooses the real one.
ALLOCATORS = {"bfc": "BFC", "rmm_pool": "POOL", "rmm_arena": "ARENA", "rmm_binning": "BINNING"}


def build(folder, definition):
    """Makes a library in the folder, and returns its name."""
    options, libraries = ["-std=c++17"], []
    if definition == "BFC":
        package = installed([f"tensorflow-cpu=={PINNED['tensorflow-cpu']}"]) / "tensorflow"
        headers, libraries = [package / "include"], [package / "libtensorflow_framework.so.2"]
    else:
        package = installed([f"librmm-cu13=={PINNED['librmm-cu13']}"])
        include = package / "librmm/include"
        runtime = installed(["nvidia-cuda-runtime==13.5.37", "nvidia-cuda-crt==13.5.37"]) / "nvidia/cu13/include"
        headers = [include, include / "rapids", include / "rapids/libcudacxx", package / "rapids_logger/include", runtime]
        libraries = [package / "librmm/lib64/librmm.so", package / "rapids_logger/lib64/librapids_logger.so"]
        options = ["-std=c++20", "-Wl,--no-as-needed"]
    library = folder / f"{definition.lower()}.so"
    # The process that calls it has functions of the CUDA runtime, too.
    command = ["g++", "-O3", "-w", "-DNDEBUG", f"-D{definition}", "-shared", "-fPIC", "-Wl,-Bsymbolic", *options, "-o", library, HERE / "speed.cpp"]
    command += [*(f"-I{header}" for header in headers), *libraries, *(f"-Wl,-rpath,{library.parent}" for library in libraries)]
    subprocess.run(command, check=True)
    return library.name


def suite(folder):
    lines = ["about: The allocators of TensorFlow and RMM beside ours.", "needs: { memory: 40GiB }", "arms:"]
    for ours, definition in ALLOCATORS.items():
        path = build(folder, definition)
        lines += [f"  - {ours}", f"  - library: {{ name: real_{ours}, path: {path}, alloc: real_malloc, free: real_free }}"]
    lines += ["time:", *(f"  - trace: {{ file: {trace} }}" for trace in sorted(TRACES.glob("*.gz")))]
    path = folder / "suite.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


def times(report):
    """The median time of an operation, in nanoseconds, by trace and allocator."""
    [suite] = json.loads((report / "benchmark.json").read_text())["suites"]
    return {
        (entry["group"], entry["arm"]): entry["outcome"]["measured"]["summary"]["median"] / 1000
        for entry in suite["entries"]
        if entry["quantity"] == "host_time" and "measured" in entry["outcome"]
    }


def main(budget="60s"):
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        report = Path(name) / "report"
        command = [HARNESS, "bench", suite(Path(name)), "--device", "sim", "--budget", budget, "--report", report]
        ran = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if not (report / "benchmark.json").exists():
            sys.exit(ran.stderr)
        found = times(report)
    print("| trace |", " | ".join(ALLOCATORS), "|\n|---|" + "---:|" * len(ALLOCATORS))
    for trace in sorted({trace for trace, _ in found}):
        pairs = [(found.get((trace, ours)), found.get((trace, f"real_{ours}"))) for ours in ALLOCATORS]
        cells = [f"{real / ours:.1f} ({ours:.0f} ns)" if ours and real else "" for ours, real in pairs]
        print(f"| {trace} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main(*sys.argv[1:])
