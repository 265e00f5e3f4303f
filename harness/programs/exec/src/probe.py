# Prints the torch that this interpreter would import, as one line of JSON, without importing it.
# An argument replaces the first entry of sys.path: the folder of the program's script.
import importlib.util
import json
import os
import sys

if len(sys.argv) > 1 and not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
    sys.path[0] = sys.argv[1]
found = {
    "python": sys.executable,
    "is_64_bit": sys.maxsize > 2**32,
    "machine": os.uname().machine,
    "has_special_rights": bool(os.stat(sys.executable).st_mode & 0o6000),
    "packages": [os.path.realpath(entry) for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages")],
    "torch": None,
}
try:
    found["libc"] = os.confstr("CS_GNU_LIBC_VERSION")
except (ValueError, OSError):
    found["libc"] = None
spec = importlib.util.find_spec("torch")
if spec is not None and spec.origin is not None:
    folder = os.path.dirname(os.path.realpath(spec.origin))
    version = {}
    try:
        # A FIFO would block.
        if os.path.isfile(os.path.join(folder, "version.py")):
            with open(os.path.join(folder, "version.py")) as file:
                exec(compile(file.read(), file.name, "exec"), version)
    except Exception:
        pass  # The missing version is reported.
    try:
        from importlib.metadata import requires

        needed = requires("torch") or []
    except Exception:
        needed = []
    found["torch"] = {
        "folder": folder,
        "version": version.get("__version__"),
        "cuda": version.get("cuda"),
        "hip": version.get("hip"),
        "requires": [line for line in needed if line.startswith("nvidia-cudnn")],
    }
print("\n" + json.dumps(found))
