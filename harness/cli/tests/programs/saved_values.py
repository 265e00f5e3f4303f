# Saves values that nothing computes. To write them into a file is no read, unless the program may see them; to read the file is one. Each line that ends
# with `# read` is one read, in the order of this file.
import copy, io, os, pickle, shutil, subprocess, sys
import torch
import torch.distributed.checkpoint as checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

if sys.argv[1:]:
    torch.ones(1, device="cuda")


def load(path):
    if torch.load(path, map_location="cpu")["step"] > 1:  # read
        print("resumed")


class Rounded:
    """Its code sees the values while it is saved."""

    def __init__(self, values):
        self.values = values

    def __reduce__(self):
        return Rounded, (self.values[0].item(),)  # read


class Seen(io.FileIO):
    """A file whose code sees the values."""


if sys.argv[1:]:
    load(sys.argv[1])
    sys.exit()
noise = torch.randn(1000, device="cuda")
state = {"noise": noise, "step": 1}
torch.save(copy.deepcopy(state), "model.pt")
torch.save(state, "legacy.pt", _use_new_zipfile_serialization=False)
with open("open.pt", "wb") as file:
    torch.save(state, file)
save_file({"noise": noise}, "model.safetensors")
checkpoint.save(state, checkpoint_id="checkpoint", no_dist=True)
torch.save(torch.arange(1000).cuda(), "known.pt")
torch.save(Rounded(noise), "rounded.pt")
buffer = io.BytesIO()
torch.save(state, buffer)  # read
with open("both.pt", "w+b") as file:
    torch.save(state, file)  # read
with Seen("seen.pt", "w") as file:
    torch.save(state, file)  # read
pickle.dumps(noise)  # read
save({"noise": noise})  # read
noise.cpu()  # read
torch.load("known.pt")
os.rename("checkpoint", "renamed")
os.replace("legacy.pt", "replaced.pt")
shutil.copyfile("model.pt", "best.pt")
torch.load("model.pt")  # read
torch.load("replaced.pt")  # read
load_file("model.safetensors")  # read
assert isinstance(safe_open("model.safetensors", "pt"), safe_open)  # read
assert isinstance(safe_open, type)
checkpoint.load(copy.deepcopy(state), checkpoint_id="renamed", no_dist=True)  # read
open("open.pt", "rb").read()  # read
os.link("open.pt", "linked.pt")
open("linked.pt", "rb").read()  # read
torch.save(1, "open.pt")
torch.load("open.pt")
with open("replaced.pt", "w") as file:
    file.write("text")
open("replaced.pt").read()
os.replace("known.pt", "model.pt")
torch.load("model.pt")
subprocess.run([sys.executable, __file__, "best.pt"], check=True)
