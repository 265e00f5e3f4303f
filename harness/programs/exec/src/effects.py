# Watches what the processes of a program change outside of themselves, by Python's audit events. `harness exec` repeats no run with such an effect, and
# makes no copies after one. Exempt is what a second run does not repeat, or repeats without harm: files that `tempfile` names, Python's compiled modules,
# caches, devices, local sockets in the folder for temporary files, and the files of the run.
import functools
import os
import stat
import sys
from io import open  # The program may replace that of `builtins`.

import harness_guard as guard

_RUN = os.environ["HARNESS_GPU_RUN"]
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Events, with what the program does, and the positions of paths and of their folders among the arguments.
_FILES = {
    "os.mkdir": ("creates", ((0, 2),)),
    "harness.make": ("creates", ((0, 1),)),
    "os.remove": ("removes", ((0, 1),)),
    "os.rmdir": ("removes", ((0, 1),)),
    "os.rename": ("renames", ((0, 2), (1, 3))),
    "os.link": ("links", ((1, 3),)),
    "os.symlink": ("links", ((1, 2),)),
    "os.truncate": ("truncates", ((0, None),)),
    "os.chmod": ("changes", ((0, 2),)),
    "os.chown": ("changes", ((0, 3),)),
    "os.utime": ("changes", ((0, 3),)),
    "os.setxattr": ("changes", ((0, None),)),
    "os.removexattr": ("changes", ((0, None),)),
    "sqlite3.connect": ("opens", ((0, None),)),
}
_STARTS = {"os.exec", "os.posix_spawn", "os.system", "subprocess.Popen"}
_SOCKETS = {"socket.bind", "socket.connect", "socket.sendto", "socket.sendmsg"}
# What copies would share.
_SHARED = {
    "tempfile.mkstemp": "creates a temporary file",
    "tempfile.mkdtemp": "creates a temporary folder",
    "os.fork": "forks",
    "os.forkpty": "forks",
}
_SIGNALS = {"os.kill", "os.killpg"}
_EVENTS = {"open", "builtins.input", "ctypes.dlsym", "syslog.syslog", *_SIGNALS, *_FILES, *_STARTS, *_SOCKETS, *_SHARED}
# Functions of `os` without an event: those that create files, and those that write to the descriptor that is this argument.
_MAKERS = ("mkfifo", "mknod")
_WRITERS = {"write": 0, "writev": 0, "pwrite": 0, "pwritev": 0, "sendfile": 0, "copy_file_range": 1, "splice": 1}
# Functions of the C library that a program can call through `ctypes`. Those that write to standard output are none of them.
_OF_C = frozenset(
    "write pwrite writev pwritev open open64 openat creat fopen fopen64 fdopen dprintf fwrite fputs fprintf sendfile unlink unlinkat remove rename renameat mkdir "
    "mkdirat rmdir link linkat symlink symlinkat truncate truncate64 ftruncate chmod fchmod chown mkfifo mknod system popen execv execve execvp posix_spawn kill "
    "killpg send sendto sendmsg connect shm_open".split()
)
# Programs that only read what no run changes.
_READERS = ("ldconfig", "uname", "lscpu")
# Programs that only read, and compilers, whose results are in caches.
_HARMLESS = (*_READERS, "file", "nvidia-smi", "cc", "gcc", "g++", "c++", "clang", "clang++", "ptxas", "ptxas-blackwell", "nvcc")

# The places noted of programs that were started without the variables of the run.
_MOST_PLACES = 64

# The first effect that a second run would repeat, and the first that copies would share, after the words "the program".
first = None
first_shared = None
_is_watching = True
# Called with each event, its arguments and the frame that raised it.
also = None
# Files and folders that `tempfile` has named.
_temporary = set()
_without_variables = set()
_caches = os.path.abspath(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) + os.sep


def _absolute(path, folder):
    path = os.fsdecode(path)
    if isinstance(folder, int) and folder >= 0 and not os.path.isabs(path):
        path = os.path.join(os.readlink("/proc/self/fd/%d" % folder), path)
    return os.path.abspath(path)


def _shown(path):
    return "the descriptor %d" % path if isinstance(path, int) else os.fsdecode(path)


def _is_of_run(process):
    """Returns whether a process, or the first one of a group, belongs to this run."""
    if process in (0, os.getpid(), os.getpgrp()):
        return True
    try:
        with open("/proc/%d/environ" % process, "rb") as variables:
            return b"HARNESS_GPU_RUN=" + os.fsencode(_RUN) in variables.read().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return True  # There is no such process, or it has ended.
    except OSError:
        return False


def _find_inherited():
    """Returns the descriptors through which this program can write outside of itself, except for its standard streams. Those of a process that another
    process of the run starts are the run's."""
    import fcntl

    found = set()
    for number in () if _is_of_run(os.getppid()) else map(int, os.listdir("/proc/self/fd")):
        try:
            kind, flags = os.fstat(number).st_mode, fcntl.fcntl(number, fcntl.F_GETFL)
            if number > 2 and flags & os.O_ACCMODE and not stat.S_ISCHR(kind) and not os.readlink("/proc/self/fd/%d" % number).startswith(_RUN):
                found.add(number)
        except OSError:
            pass  # The descriptor of the listed folder.
    return found


_inherited = _find_inherited()


def _is_exempt(path, folder=None):
    # An open file was opened by another event, or before this program.
    if isinstance(path, int):
        return path not in _inherited
    try:
        path = _absolute(path, folder)
    except FileNotFoundError:
        return True  # The folder is not open, or not there: the call fails, too.
    if path.startswith((_RUN, _caches, "/proc/")) or "__pycache__" in path or path.startswith("/dev/") and not path.startswith("/dev/shm/"):
        return True
    # Compilers add an ending to the name of their input.
    if path.startswith(tuple(name + "." for name in _temporary)):
        return True
    while path not in _temporary:
        folder = os.path.dirname(path)
        if folder == path:
            return False
        path = folder
    return True


def _is_in_temporary_folder(path):
    tempfile = sys.modules.get("tempfile")
    folder = getattr(tempfile, "tempdir", None) or os.environ.get("TMPDIR") or "/tmp"
    return os.path.abspath(os.fsdecode(path)).startswith(os.path.abspath(folder) + os.sep)


def _has_variables(event, arguments):
    """Returns whether a program that is started has the variables of the run."""
    environment = None if event == "os.system" else arguments[3 if event == "subprocess.Popen" else 2]
    if environment is None or not hasattr(environment, "keys"):
        environment = os.environ  # Without keys, the start fails.
    return "HARNESS_GPU_RUN" in environment or environment is not os.environ and b"HARNESS_GPU_RUN" in environment


def _note_without_variables(program):
    """Notes the line that starts a program without the variables of the run, so without the simulated GPU."""
    frame, elsewhere = guard.caller(), (os.path.dirname(os.__file__) + os.sep, "<frozen ")
    while frame.f_back is not None and frame.f_code.co_filename.startswith(elsewhere):
        frame = frame.f_back
    place = (program, frame.f_code.co_filename, frame.f_lineno or 0)
    if place not in _without_variables and len(_without_variables) < _MOST_PLACES:
        _without_variables.add(place)
        with open(os.path.join(_RUN, "without-variables-%d.jsonl" % os.getpid()), "a") as file:
            file.write(guard.as_json({"program": program, "file": place[1], "line": place[2], "name": frame.f_code.co_name}) + "\n")


def _has_hook(event, arguments):
    """Returns whether a Python that is started runs the hook: it has the variables, and no option that ignores them or `site`."""
    if not _has_variables(event, arguments):
        return False
    words = arguments[1]
    for word in map(os.fsdecode, () if isinstance(words, (str, bytes)) else words[1:]):
        if not word.startswith("-") or word.startswith(("-c", "-m")):
            break
        if not word.startswith("--") and set("IES") & set(word):
            return False
    return True


def _program(event, arguments):
    """The name of the program that is started."""
    return "sh" if event == "os.system" else os.path.basename(_shown(arguments[0] or (arguments[1] or ("",))[0]))


def _asks_for_ipv6(frame):
    """Returns whether a frame is that of urllib3, whose import binds a free port to find out whether there is IPv6, and closes it."""
    return frame.f_code.co_name == "_has_ipv6" and str(frame.f_globals.get("__name__")).endswith("urllib3.util.connection")


def _effect_of(event, arguments):
    """Returns what an event does that a second run would repeat; None if nothing."""
    if event == "open":
        path, _, flags = arguments[:3]
        return None if not flags & _WRITES or _is_exempt(path) else "writes %s" % _shown(path)
    if event in _FILES:
        verb, places = _FILES[event]
        named = [(arguments[at], arguments[of] if of is not None and of < len(arguments) else None) for at, of in places]
        # A connection without a file and a folder that exists change nothing.
        named = [(path, folder) for path, folder in named if path not in (":memory:", "") and not (event == "os.mkdir" and os.path.isdir(path))]
        changed = [path for path, folder in named if not _is_exempt(path, folder)]
        return "%s %s" % (verb, _shown(changed[0])) if changed else None
    if event in _STARTS:
        program = arguments[0] or (arguments[1] or ("",))[0]
        if event != "os.system":
            # The hook watches other processes of Python.
            name = _program(event, arguments)
            if name in _HARMLESS or (name.startswith("python") or program == sys.executable) and _has_hook(event, arguments):
                return None
        return "starts %s" % _shown(program)
    if event in _SOCKETS:
        address = arguments[1]
        if isinstance(address, (str, bytes)):
            return None if _is_in_temporary_folder(address) else "opens the socket %s" % os.fsdecode(address)
        return None if address is None else "opens a socket to %s" % ":".join(map(str, address[:2]))
    if event in _SIGNALS:
        process, signal = arguments
        return None if signal == 0 or _is_of_run(abs(process)) else "sends a signal to process %d" % abs(process)
    if event == "ctypes.dlsym":
        library = os.path.basename(getattr(arguments[0], "_name", "") or "libc.so")
        return "uses the C function %s" % arguments[1] if library.startswith("libc.so") and arguments[1] in _OF_C else None
    return "writes to the log of the system" if event == "syslog.syslog" else "reads its standard input"


# At the interpreter's exit this module's names become None, while destructors of the program still run.
def _watch(event, arguments):
    global first, first_shared
    caller = guard.caller()
    if also:
        also(event, arguments, caller)
    if not _is_watching:
        return
    if event in _STARTS and not _has_variables(event, arguments) and _program(event, arguments) not in _HARMLESS:
        _note_without_variables(_program(event, arguments))
    if first:
        return
    if event in _SHARED:
        first_shared = first_shared or _SHARED[event]
        if event.startswith("tempfile."):
            _temporary.add(os.path.abspath(os.fsdecode(arguments[0])))
    elif caller is not None and caller.f_globals.get("__name__") == "tempfile":
        # It tries to write into the folder, once.
        if event == "open" and arguments[2] & os.O_EXCL:
            _temporary.add(os.path.abspath(os.fsdecode(arguments[0])))
    elif event != "socket.bind" or caller is None or not _asks_for_ipv6(caller):
        first = _effect_of(event, arguments)
        is_start = event in _STARTS and _program(event, arguments) not in _READERS
        first_shared = first_shared or ("starts other programs" if is_start else first)
        if first:
            _write()


def _write():
    """Writes the effect into the folder of the run, for the process that repeats it."""
    path = os.path.join(_RUN, "effect-%d" % os.getpid())
    if os.path.exists(path):
        return  # That of the program before `exec`.
    # A killed process leaves no empty effect. At the interpreter's end there is no `open`.
    file = os.open(path + ".unfinished", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.write(file, first.encode(errors="replace"))
    finally:
        os.close(file)
    os.replace(path + ".unfinished", path)


def stop():
    """Ends the watch for copies."""
    global _is_watching
    _is_watching = False


def note_write(path):
    """Reports a file that code outside of Python is about to write."""
    sys.audit("open", path, "wb", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


def note_read(path):
    """Reports a file that code outside of Python is about to read."""
    sys.audit("open", path, "rb", os.O_RDONLY)


def _announce(name, event):
    """Makes a function of `os` raise the event that Python lacks."""
    if not hasattr(os, name):
        return

    guard.before(os, name, lambda *arguments, **named: functools.partial(event, arguments, named))


def _announce_all():
    def makes(arguments, named):
        path = arguments[0] if arguments else named.get("path")
        folder = named.get("dir_fd")
        sys.audit("harness.make", path, -1 if folder is None else folder)

    for name in _MAKERS:
        _announce(name, makes)
    # Others come from files that were opened by another event.
    for name, place in _WRITERS.items() if _inherited else ():
        _announce(name, lambda arguments, _, place=place: sys.audit("open", *arguments[place : place + 1] or (-1,), None, os.O_WRONLY))


def begin():
    """Watches this process."""
    _announce_all()
    guard.on_events(_watch, _EVENTS)
