"""Records the decisions of the allocators of TensorFlow, RMM, ONNX Runtime, JAX and CuPy, which run here without a GPU.

    python3 ci/allocators/record.py FOLDER               writes recordings to FOLDER, with the pinned versions below
    python3 ci/allocators/record.py FOLDER SEEDS OPERATIONS [ALLOCATOR…]   the same for as many random traces of this length
    python3 ci/allocators/record.py --versions [NAME=VERSION…]   counts operations that other versions decide as the pinned ones

JAX runs under `harness exec`. HARNESS is the program, else `target/debug/harness`.

Needs Python 3.11, g++ with C++20, PyPI, and 2 GiB below ~/.cache/harness. `harness replay --verify` compares recordings with our allocators."""
import gzip
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("HARNESS_CACHE", Path.home() / ".cache/harness")) / "allocators"
PINNED = {"tensorflow-cpu": "2.21.0", "librmm-cu13": "26.10.0", "onnxruntime": "1.31.0", "jax-cuda13-pjrt": "0.12.0.1",
          "cupy-cuda13x": "14.2.0"}
# The package and the recorder of an allocator.
RECORDER = {
    "bfc": ("tensorflow-cpu", "bfc.cpp"),
    "rmm_pool": ("librmm-cu13", "rmm_pool.cpp"),
    "rmm_arena": ("librmm-cu13", "rmm_resources.cpp"),
    "rmm_binning": ("librmm-cu13", "rmm_resources.cpp"),
    "ort_arena": ("onnxruntime", "ort_arena.cpp"),
    "xla_bfc": ("jax-cuda13-pjrt", "xla_bfc.cpp"),
    "cupy_pool": ("cupy-cuda13x", "cupy_pool.py"),
}
HARNESS = os.environ.get("HARNESS", HERE.parent.parent / "target/debug/harness")
GIB = 1 << 30
OPERATIONS = 500
# Name, allocator, streams, kinds of traces, the allocator's memory, the device's memory, options of the recorder.
CONFIGURATIONS = [
    ("growing", "bfc", 1, "small mixed large pressure", 4 * GIB, None, {"limit": 4 * GIB}),
    ("keeping", "bfc", 1, "large pressure", 4 * GIB, None, {"limit": 4 * GIB, "gc": 0}),
    ("whole", "bfc", 1, "mixed pressure", 4 * GIB, None, {"limit": 4 * GIB, "growth": 0}),
    ("odd", "bfc", 1, "pressure", 4 * GIB, None, {"limit": 3000000123}),
    ("scarce", "bfc", 1, "large pressure", 3 * GIB, 4 * GIB, {"limit": 4 * GIB}),
    ("scarce_keeping", "bfc", 1, "large pressure", 3 * GIB, 4 * GIB, {"limit": 4 * GIB, "gc": 0}),
    ("initial", "rmm_pool", 3, "small mixed large pressure", 4 * GIB, None, {"initial": GIB, "maximum": 3 * GIB}),
    ("empty", "rmm_pool", 1, "large pressure", 4 * GIB, None, {"initial": 0, "maximum": 3 * GIB}),
    ("streams", "rmm_pool", 8, "small mixed large pressure", 4 * GIB, None, {"initial": 0, "maximum": 3 * GIB}),
    ("odd", "rmm_pool", 3, "large pressure", 4 * GIB, None, {"initial": 256, "maximum": 3 * GIB + 256}),
    ("scarce", "rmm_pool", 8, "large pressure", 2 * GIB, 4 * GIB, {"initial": 0, "maximum": 3 * GIB}),
    ("unlimited", "rmm_pool", 1, "mixed pressure", 4 * GIB, None, {"initial": 268435456}),
    ("unlimited_streams", "rmm_pool", 8, "mixed large", 4 * GIB, None, {"initial": 0}),
    ("doubling", "ort_arena", 1, "small mixed large pressure", 4 * GIB, None, {}),
    ("limited", "ort_arena", 1, "mixed pressure", 4 * GIB, None, {"limit": 3000000123, "largest": 1 << 28}),
    ("tuned", "ort_arena", 1, "mixed pressure", 3 * GIB, 4 * GIB, {"initial": 5000000, "dead": 1 << 24}),
    ("same", "ort_arena", 1, "mixed large pressure", 4 * GIB, None, {"strategy": 1, "limit": 3 * GIB}),
    ("unlimited", "cupy_pool", 3, "small mixed pressure", 4 * GIB, None, {}),
    ("limited", "cupy_pool", 3, "mixed large pressure", 4 * GIB, None, {"limit": 3 * GIB + 5}),
    ("scarce", "cupy_pool", 8, "large pressure", 2 * GIB, 4 * GIB, {"limit": 3 * GIB}),
    ("shrinking", "ort_arena", 1, "emptied", GIB, None, {"growth": 3 << 20}),
    ("shrinking_same", "ort_arena", 1, "emptied", GIB, None, {"strategy": 1}),
    ("emptied", "cupy_pool", 3, "emptied", GIB, None, {}),
    ("preallocated", "xla_bfc", 1, "small mixed large pressure", 4 * GIB, 8 * GIB, {"limit": 4 * GIB}),
    ("tight", "xla_bfc", 1, "pressure", 4 * GIB, 8 * GIB, {"limit": GIB * 5 // 2}),
    ("growing", "xla_bfc", 1, "mixed large pressure", 4 * GIB, 8 * GIB, {"limit": 4 * GIB, "preallocate": 0}),
    ("tiny", "rmm_pool", 2, "tiny", 4 * GIB, None, {"initial": 0, "maximum": 12800}),
    ("single", "rmm_arena", 1, "small large pressure", 4 * GIB, None, {"size": GIB}),
    ("streams", "rmm_arena", 8, "mixed large pressure superblocks", 4 * GIB, None, {"size": 2 * GIB}),
    ("tight", "rmm_arena", 8, "small superblocks", 4 * GIB, None, {"size": 64 << 20}),
    ("odd", "rmm_arena", 3, "pressure", 4 * GIB, None, {"size": (256 << 20) + 255}),
    ("unlimited", "rmm_binning", 1, "pressure", 4 * GIB, None, {"least": 18, "largest": 22, "initial": GIB}),
    ("initial", "rmm_binning", 3, "mixed pressure blocks", 4 * GIB, None, {"least": 18, "largest": 22, "initial": GIB, "maximum": 3 * GIB}),
    ("unlimited_streams", "rmm_binning", 8, "large pressure blocks", 4 * GIB, None, {"least": 18, "largest": 22, "initial": 0}),
    ("small", "rmm_binning", 3, "tiny small", 4 * GIB, None, {"least": 8, "largest": 16, "initial": 0, "maximum": 3 * GIB}),
    ("scarce", "rmm_binning", 8, "pressure blocks", 384 << 20, 4 * GIB, {"least": 18, "largest": 20, "initial": 0}),
    ("fixed", "rmm_binning", 3, "blocks", 512 << 20, None, {"least": 20, "largest": 20, "initial": 256 << 20, "fixed": 1}),
]
# The smallest and the largest request of a kind, the bytes after which a trace only frees, how often it empties the cache, and how often it frees before.
KINDS = {
    "tiny": (1, 1 << 11, 1 << 14, 0),
    "small": (1, 1 << 18, 80 << 20, 0),
    "mixed": (1, 1 << 26, 2 * GIB, 0),
    "large": (1 << 20, 1 << 29, 3 * GIB, 0),
    "pressure": (1, 1 << 27, 4 * GIB + GIB // 2, 0),
    "emptied": (1, 1 << 26, GIB + GIB // 4, 0.04),
    "superblocks": (1 << 8, 1 << 22, 128 << 20, 0),
    "blocks": (1 << 19, 1 << 20, 240 << 20, 0, 0.15),
}


def trace(kind, streams, seed=""):
    low, high, target, emptied, freed = (*KINDS[kind], 0.42)[:5]
    rng = random.Random(f"{kind} {streams}{seed}")
    common = [rng.randrange(low, high) for _ in range(12)]
    live, lines, number = {}, [], 0
    while len(lines) < OPERATIONS:
        if emptied and rng.random() < emptied:
            lines.append("e")
            continue
        if live and (sum(live.values()) > target or rng.random() < freed):
            # Most programs free in the order of a stack, some in any order.
            name = rng.choice(list(live)) if rng.random() < 0.5 else list(live)[-1]
            del live[name]
            lines.append(f"f {name}")
            continue
        number += 1
        live[number] = rng.choice(common) if rng.random() < 0.5 else int(low * (high / low) ** rng.random())
        lines.append(f"a {number} {live[number]} {rng.randrange(streams)}")
    return lines


def installed(packages):
    """The folder with the headers and libraries of these packages, which is made once."""
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = CACHE / "-".join(packages).replace("==", "-")
    if folder.exists():
        return folder
    new = Path(tempfile.mkdtemp(dir=CACHE, prefix="new-"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if packages[0].startswith("tensorflow"):
        # The whole package takes 1.3 GB.
        with tempfile.TemporaryDirectory(dir=CACHE) as wheels:
            subprocess.run([*pip, "download", "--no-deps", "--dest", wheels, *packages], check=True)
            with zipfile.ZipFile(next(Path(wheels).iterdir())) as wheel:
                wheel.extractall(new, [name for name in wheel.namelist() if name.startswith(("tensorflow/include/", "tensorflow/libtensorflow_framework"))])
    else:
        subprocess.run([*pip, "install", "--no-compile", "--target", new, *packages], check=True)
    new.rename(folder)
    return folder


def recorder(package, version, source):
    """The command that runs this version's allocator with this program."""
    folder = installed([f"{package}=={version}"])
    if package.startswith("cupy"):
        return ["env", f"PYTHONPATH={folder}", sys.executable, HERE / source]
    source = HERE / source
    program = CACHE / f"{source.stem}-{version}"
    arguments = [*(folder / "onnxruntime/capi").glob("libonnxruntime.so.*"), *folder.glob("jax_plugins/*/xla_cuda_plugin.so")]
    if program.exists() and program.stat().st_mtime > source.stat().st_mtime:
        return [program, *arguments]
    command = ["g++", "-O1", "-w", "-DNDEBUG", "-o", program, source]
    if package == "tensorflow-cpu":
        library = folder / "tensorflow"
        command += ["-std=c++17", f"-I{library}/include", library / "libtensorflow_framework.so.2", f"-Wl,-rpath,{library}"]
    elif package in ("onnxruntime", "jax-cuda13-pjrt"):
        command += ["-std=c++17", "-rdynamic", "-ldl"]
    else:
        headers = [folder / "librmm/include", folder / "librmm/include/rapids", folder / "librmm/include/rapids/libcudacxx", folder / "rapids_logger/include"]
        headers += [installed(["nvidia-cuda-runtime==13.5.37", "nvidia-cuda-crt==13.5.37"]) / "nvidia/cu13/include"]
        libraries = [folder / "librmm/lib64/librmm.so", folder / "rapids_logger/lib64/librapids_logger.so"]
        libraries = [library for library in libraries if library.exists()]  # RMM 25.04 has headers only.
        # RMM before 26.02 requires the definition.
        command += ["-std=c++20", "-rdynamic", "-DLIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE", *(f"-I{path}" for path in headers)]
        command += [*libraries, "-ldl", "-lrt", "-lpthread"]
        command += [f"-Wl,-rpath,{library.parent}" for library in libraries]
    subprocess.run(command, check=True)
    return [program, *arguments]


def decisions(program, operations, capacity, options):
    with tempfile.NamedTemporaryFile("w", suffix=".trace") as file:
        file.write("\n".join(operations) + "\n")
        file.flush()
        command = [*program, file.name, str(capacity), *(f"{key}={value}" for key, value in options.items())]
        out = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, timeout=300)
    return out.stdout.splitlines()


def settings_of(allocator, options):
    """The settings in a recording, with our names."""
    if allocator == "bfc":
        return {"memory_limit": options["limit"], "allow_growth": options.get("growth", 1) == 1, "garbage_collection": options.get("gc", 1) == 1}
    if allocator == "ort_arena":
        names = {"limit": "max_mem", "initial": "initial_chunk_size_bytes", "dead": "max_dead_bytes_per_chunk", "growth": "initial_growth_chunk_size_bytes", "largest": "max_power_of_two_extend_bytes"}
        return {names[key]: value for key, value in options.items() if key != "strategy"} | {"same_as_requested": options.get("strategy") == 1}
    if allocator == "xla_bfc":
        return {"preallocate": options.get("preallocate", 1) == 1, "memory_limit": options["limit"]}
    if allocator == "cupy_pool":
        return {"limit": options.get("limit")}
    if allocator == "rmm_arena":
        return {"arena_size": options["size"]}
    pool = {"initial_pool_size": options["initial"], "maximum_pool_size": options.get("maximum")}
    if allocator == "rmm_binning":
        return {"pool": pool, "min_size_exponent": options["least"], "max_size_exponent": options["largest"]}
    return pool


def recorded(programs, seeds=("",)):
    """The name, header and decisions of each recording."""
    for name, allocator, streams, kinds, capacity, total, options in CONFIGURATIONS:
        if allocator not in programs:
            continue
        package, source = RECORDER[allocator]
        program = programs[allocator]
        if source == "rmm_resources.cpp":
            program = [*program, "fixed" if "fixed" in options else allocator.removeprefix("rmm_")]
        for kind, seed in itertools.product(kinds.split(), seeds):
            operations = trace(kind, streams, seed)
            if allocator == "xla_bfc":
                simulated = [HARNESS, "exec", "--cuda", "13", "--memory", str(total), "--", *program]
                lines = decisions(simulated, operations, total, options)
            else:
                lines = decisions(program, operations, capacity, options)
            header = {"library": f"{package} {PINNED[package]}", "allocator": allocator, "settings": settings_of(allocator, options), "capacity": capacity}
            header |= {"total": total} if total else {}
            addresses = "linux" if allocator == "xla_bfc" else "up"
            yield f"{allocator}-{name}-{kind}{seed}", header | {"va": addresses, "trace": operations}, lines


def write(folder, allocators, seeds=("",)):
    programs = {}
    for allocator in allocators:
        package, source = RECORDER[allocator]
        programs[allocator] = recorder(package, PINNED[package], source)
    for name, header, lines in recorded(programs, seeds):
        text = "\n".join(json.dumps(part, separators=(",", ":")) for part in [header, *lines]) + "\n"
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def versions(chosen):
    for package, version in chosen:
        of = next(pinned for pinned in PINNED if pinned.split("-")[0] == package.split("-")[0])
        # rmm_resources.cpp needs functions of the pinned version by name.
        of_package = {allocator: source for allocator, (name, source) in RECORDER.items() if name == of and source != "rmm_resources.cpp"}
        pinned = {name: lines for name, _, lines in recorded({allocator: recorder(of, PINNED[of], source) for allocator, source in of_package.items()})}
        theirs = {name: lines for name, _, lines in recorded({allocator: recorder(package, version, source) for allocator, source in of_package.items()})}
        differing = []
        for name, lines in pinned.items():
            equal = sum(a == b or b.endswith(" ?") and a.rsplit(" ", 1)[0] == b[:-2] for a, b in zip(lines, theirs[name]))
            if equal < len(lines):
                differing.append(f"{name} {equal} of {len(lines)}")
        print(f"{package} {version}: {len(pinned) - len(differing)} of {len(pinned)} recordings are equal; {', '.join(differing) or 'none differs'}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--versions"]:
        versions([tuple(name.split("=")) for name in sys.argv[2:]])
    elif len(sys.argv) > 2:
        OPERATIONS = int(sys.argv[3])
        write(Path(sys.argv[1]), sys.argv[4:] or RECORDER, [f"-{seed}" for seed in range(int(sys.argv[2]))])
    else:
        write(Path(sys.argv[1]), RECORDER)
