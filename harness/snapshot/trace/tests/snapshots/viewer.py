"""Prints all that PyTorch's own viewer, torch.cuda._memory_viz, says of a snapshot. The viewer is loaded from its file: PyTorch itself, which may want
a GPU's libraries, is not. Exits with 2 and the reason where there is no PyTorch 2.11."""

import importlib.metadata
import importlib.util
import pathlib
import pickle
import sys

torch = importlib.util.find_spec("torch")
if torch is None or not importlib.metadata.version("torch").startswith("2.11."):
    print(f"{sys.executable} has no torch 2.11", file=sys.stderr)
    sys.exit(2)
file = pathlib.Path(torch.origin).parent / "cuda" / "_memory_viz.py"
spec = importlib.util.spec_from_file_location("_memory_viz", file)
viz = importlib.util.module_from_spec(spec)
spec.loader.exec_module(viz)
with open(sys.argv[1], "rb") as snapshot:
    data = pickle.load(snapshot)
for view in [viz.segsum(data), viz.trace(data), viz.segments(data, str), viz.memory(data, str)]:
    print(view)
