# Files into which a program saves values that nothing has computed. PyTorch and safetensors copy the values to the host and write them at once, so code of
# the program does not see them, and the copy does not count as a read. A process of the run that opens such a file can see them: that is a read. The folder
# of the run has an empty file for each, under its path.
import io
import os
import stat
import sys

# Whose functions lie between the copy and the functions below.
_BETWEEN = {"torch.storage", "torch.serialization", "safetensors.torch", "torch.distributed.checkpoint.filesystem"}
# Functions that write what they copy, with their variable that names the file, or is the open file.
_WRITERS = {
    ("torch.serialization", "save"): "f",
    ("safetensors.torch", "save_file"): "filename",
    ("torch.distributed.checkpoint.filesystem", "_write_files_from_queue"): "file_name",
}
# Those that copy before they open the file.
_COPY_FIRST = set(_WRITERS) - {("torch.serialization", "save")}

# Counts a read.
count = None
# The folder with the empty files.
folder = None


def _name(frame):
    return frame.f_globals.get("__name__") if frame is not None else None


def _own(path):
    return folder + os.path.realpath(os.fsdecode(path))


def _path_of(target):
    """The path of a file that cannot be read before it is opened again; None for buffers, pipes, and files that are open for reading too."""
    if type(target) is io.BufferedWriter and type(target.raw) is io.FileIO and not target.readable():
        target = target.name
    if not isinstance(target, (str, bytes, os.PathLike)):
        return None
    try:
        is_file = stat.S_ISREG(os.stat(target).st_mode)
    except FileNotFoundError:
        is_file = os.path.isdir(os.path.dirname(os.path.abspath(target)))
    return target if is_file else None


def _note(path):
    own = _own(path)
    if not os.path.isfile(own):
        os.makedirs(os.path.dirname(own), exist_ok=True)
        os.close(os.open(own, os.O_WRONLY | os.O_CREAT))


def is_saved(frame):
    """Returns whether the values that a frame copies to the host are only written into a file, which it notes."""
    while _name(frame) in _BETWEEN:
        variable = _WRITERS.get((_name(frame), frame.f_code.co_name))
        if variable is not None:
            path = _path_of(frame.f_locals.get(variable))
            if path is not None:
                _note(path)
            return path is not None
        frame = frame.f_back
    return False


def _absolute(path, place):
    """A path relative to the open folder of an audit event."""
    path = os.fsdecode(path)
    return os.path.join(os.readlink("/proc/self/fd/%d" % place), path) if isinstance(place, int) and place >= 0 else path


def _forget(path):
    own = _own(path)
    if os.path.isfile(own):
        os.remove(own)


def _copies_first(frame):
    while frame is not None and (_name(frame), frame.f_code.co_name) not in _COPY_FIRST:
        frame = frame.f_back
    return frame is not None


def watch(event, arguments, caller):
    """Counts an audit event that opens such a file to read it. Follows copies by `shutil`, other names, removals and new contents."""
    if not os.path.isdir(folder):
        return
    path = arguments[0]
    if event == "open":
        flags = arguments[2]
        if isinstance(path, int) or not os.path.isfile(_own(path)):
            return
        is_copy = _name(caller) == "shutil" and "dst" in caller.f_locals
        if flags & os.O_TRUNC:
            if not is_copy and not _copies_first(caller):
                _forget(path)
        elif flags & os.O_ACCMODE != os.O_WRONLY:
            _note(caller.f_locals["dst"]) if is_copy else count()
    elif event == "os.remove":
        _forget(_absolute(path, arguments[1]))
    elif event in ("os.link", "os.rename"):
        path, new = (_absolute(path, place) for path, place in zip(arguments[:2], arguments[2:]))
        if event == "os.link":
            _note(new) if os.path.isfile(_own(path)) else None
        elif os.path.exists(_own(path)):
            os.makedirs(os.path.dirname(_own(new)), exist_ok=True)
            os.replace(_own(path), _own(new))
        else:
            _forget(new)
