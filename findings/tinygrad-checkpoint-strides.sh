#!/usr/bin/env bash
# tinygrad 0.14.0 (https://pypi.org/project/tinygrad) reads wrong numbers, without an error, from a PyTorch checkpoint with some columns of a tensor.
#
# `torch.save` writes a view with the whole storage, an offset, a size and strides. `tinygrad.nn.state.torch_load` reads as many numbers as the
# view has, without a gap, from its offset (tinygrad/nn/state.py, from line 281). It uses the strides only for their order, to permute
# dimensions. So rows and permuted tensors are right. Columns are wrong, for example a half of a fused weight that `chunk` or
# `split` returned.
#
# The script writes the checkpoint itself, because PyTorch is large. PyTorch 2.11.0 reads the expected numbers from it. tinygrad needs a C compiler
# for the CPU; the script gives it gcc instead of clang, for helper functions that copy numbers.
#
# Seen on 30 November 2026 on x86-64 Linux, without a GPU: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs gcc, python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tinygrad==0.14.0
# gcc for arguments of clang. The last one is "-", for the standard output.
cat >"$folder/compiler" <<'SHELL'
#!/usr/bin/env bash
set -euo pipefail
arguments=()
for argument in "${@:1:$#-1}"; do
    [[ $argument == --target=* ]] || arguments+=("$argument")
done
object=$(mktemp -p "$(dirname "$0")")
gcc "${arguments[@]}" "$object"
cat "$object"
SHELL
chmod +x "$folder/compiler"
cat >"$folder/program.py" <<'PYTHON'
import collections
import pickle
import struct
import sys
import zipfile

from tinygrad.nn.state import torch_load

path = sys.argv[1] + "/checkpoint.pt"


class Named:
    def __init__(self, module, name):
        self.module, self.name = module, name


class View:
    def __init__(self, offset, size, stride):
        self.arguments = (offset, size, stride, False, collections.OrderedDict())


# Writes views of one tensor of 4 x 8 numbers, 0 to 31, in the format of torch.save.
class Pickler(pickle._Pickler):
    def save_named(self, named):
        self.write(pickle.GLOBAL + f"{named.module}\n{named.name}\n".encode())

    def save_view(self, view):
        self.save_named(Named("torch._utils", "_rebuild_tensor_v2"))
        self.write(pickle.MARK)
        self.save(("storage", Named("torch", "FloatStorage"), "0", "cpu", 32), save_persistent_id=False)
        self.write(pickle.BINPERSID)
        for argument in view.arguments:
            self.save(argument)
        self.write(pickle.TUPLE + pickle.REDUCE)

    dispatch = {**pickle._Pickler.dispatch, Named: save_named, View: save_view}


views = {
    "all": View(0, (4, 8), (8, 1)),
    "rows 2 to 3": View(16, (2, 8), (8, 1)),
    "columns 0 to 3": View(0, (4, 4), (8, 1)),
    "columns 4 to 7": View(4, (4, 4), (8, 1)),
    "every second": View(0, (16,), (2,)),
}
with zipfile.ZipFile(path, "w") as archive:
    with archive.open("archive/data.pkl", "w") as file:
        Pickler(file, 2).dump(views)
    archive.writestr("archive/byteorder", "little")
    archive.writestr("archive/data/0", struct.pack("<32f", *range(32)))
    archive.writestr("archive/version", "3\n")


def elements(offset, size, stride):
    if not size:
        return [offset]
    return [start + i * stride[-1] for start in elements(offset, size[:-1], stride[:-1]) for i in range(size[-1])]


for name, tensor in torch_load(path).items():
    expected = elements(*views[name].arguments[:3])
    seen = tensor.flatten().tolist()
    print(f"{name}: {'right' if seen == expected else 'wrong'}, {[int(value) for value in seen[:8]]}")
PYTHON
export CC=$folder/compiler CACHELEVEL=0 DEV=CPU XDG_CACHE_HOME=$folder
seen=$("$folder/venv/bin/python" "$folder/program.py" "$folder" 2>"$folder/log") || tail -5 "$folder/log" >&2
expected='all: right, [0, 1, 2, 3, 4, 5, 6, 7]
rows 2 to 3: right, [16, 17, 18, 19, 20, 21, 22, 23]
columns 0 to 3: wrong, [0, 1, 2, 3, 4, 5, 6, 7]
columns 4 to 7: wrong, [4, 5, 6, 7, 8, 9, 10, 11]
every second: wrong, [0, 1, 2, 3, 4, 5, 6, 7]'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
