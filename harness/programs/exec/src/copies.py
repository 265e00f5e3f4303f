# Copies of a program that has imported everything, for `harness exec` with many runs.
#
# Before torch initializes CUDA, the process forks a template and continues. The template forks a copy for each run that harness requests. HARNESS_GPU_COPIES
# has the process ID of harness, a module to import first, and the path of harness's socket. If a copy would differ from a program started anew, the process sends the reason instead.
# `_Fork` of the GNU C library runs no fork handlers, so torch does not notice the fork: it would refuse to use CUDA. Only processes with one thread fork.
import os
import stat
import sys
from io import open  # The program may replace that of `builtins`.

import harness_guard as guard

_VARIABLE = "HARNESS_GPU_COPIES"
_PARENT, _EARLY, _SOCKET = os.environ[_VARIABLE].split(":", 2)
_HARNESS = int(_PARENT)
_RUN = os.environ["HARNESS_GPU_RUN"]
_OUTPUTS = {1: "stdout", 2: "stderr"}
_OPENMP = ("libgomp", "libiomp", "libomp")
_WRITES = os.O_WRONLY | os.O_RDWR


def _descriptors():
    """The open files, without the standard ones, and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink("/proc/self/fd/" + name)
        except OSError:
            pass  # The descriptor of the listed folder.
    return {number: file for number, file in found.items() if number > 2}


_INHERITED = _descriptors()


def _obstacle(core, ctypes):
    """Returns why copies of this process would differ from programs started anew; None if they would not."""
    import signal

    if os.getppid() != _HARNESS:
        return "starts a process that uses the GPU"
    effect = sys.modules["harness_effects"].first_shared
    if effect:
        return "%s before it uses the GPU" % effect
    if not core.harness_machine_is_unused():
        return "uses the GPU before torch initializes CUDA"
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        return "has set a timer"
    if signal.getsignal(signal.SIGCHLD) != signal.SIG_DFL:
        return "handles the end of its children"
    with open("/proc/self/task/%d/children" % os.getpid()) as children:
        if children.read().strip():
            return "starts other processes before it uses the GPU"
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        lines = [line.split(maxsplit=5) for line in maps]
    if any(line[1].startswith("rw") and line[1].endswith("s") and not line[-1].startswith(_RUN) for line in lines):
        return "shares memory with other processes"
    for number, file in _descriptors().items():
        kind = stat.S_IFMT(os.stat(number).st_mode)
        if _INHERITED.get(number) == file or kind in (stat.S_IFCHR, stat.S_IFDIR):
            continue
        if kind != stat.S_IFREG or _flags(number) & _WRITES:
            return "has another descriptor of its output" if file.startswith(_RUN) else "has opened %s" % file
    for number, name in _OUTPUTS.items():
        if not os.path.samestat(os.fstat(number), os.stat(os.path.join(_RUN, name))):
            return "redirects its output"
    # OpenMP can end its threads. OpenBLAS ends its threads before a fork. Both start new ones when they need them.
    for path in {line[-1].strip() for line in lines if os.path.basename(line[-1]).startswith(_OPENMP)}:
        getattr(ctypes.CDLL(path), "omp_pause_resource_all", lambda hard: 0)(2)
    child = ctypes.PyDLL(None).fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    threads = len(os.listdir("/proc/self/task"))
    return "has %d threads when it starts to use the GPU" % threads if threads > 1 else None


def _flags(number):
    import fcntl

    return fcntl.fcntl(number, fcntl.F_GETFL)


def _fork_for_harness(library, time):
    """Forks a process that harness adopts as its child, in a process group of its own. Returns True in that process."""
    child = library._Fork()
    if child != 0:
        os.waitpid(child, 0)
        return False
    between = os.getpid()
    os.setpgid(0, 0)
    if library._Fork() != 0:
        os._exit(0)
    os.setpgid(0, 0)
    while os.getppid() == between:
        time.sleep(0.0002)
    library.prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
    if os.getppid() != _HARNESS:
        os._exit(1)
    return True


def _read_outputs():
    """What the program has written so far to its standard output and error."""
    said = {}
    for number in _OUTPUTS:
        with open("/proc/self/fd/%d" % number, "rb") as file:
            said[number] = file.read(os.lseek(number, 0, os.SEEK_CUR))
    return said


def _reopen_files():
    """Gives this copy its own offsets of the files that the program reads."""
    for number in set(_descriptors()) - set(_INHERITED):
        if stat.S_ISREG(os.stat(number).st_mode):
            again = os.open("/proc/self/fd/%d" % number, _flags(number))
            os.lseek(again, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(again, number, os.get_inheritable(number))
            os.close(again)


def _serve(channel, said, fork):
    """Forks a copy for each request, and returns in the copy. A request is its length on a line, the files for the output, and the variables."""
    requests = channel.makefile("rb")
    while True:
        length = requests.readline()
        if not length:
            os._exit(0)
        stdout, stderr, *variables = requests.read(int(length)).split(b"\0")
        if fork():
            break
    channel.sendall(b"%d\n" % os.getpid())
    requests.close()
    channel.close()
    _reopen_files()
    for number, path in ((1, stdout), (2, stderr)):
        file = os.open(path, os.O_WRONLY)
        os.write(file, said[number])
        os.dup2(file, number)
        os.close(file)
    for variable in variables:
        name, _, value = variable.partition(b"=")
        os.environb[name] = value


def _offer(core, take_over):
    """Offers copies to harness. In a copy, calls `take_over`."""
    import ctypes
    import functools
    import importlib
    import socket
    import time

    if _EARLY:
        importlib.import_module(_EARLY)
    core = ctypes.CDLL(core)
    core.harness_machine_is_unused.restype = ctypes.c_bool
    obstacle = _obstacle(core, ctypes)
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(_SOCKET)
    if obstacle:
        channel.sendall(obstacle.encode(errors="replace") + b"\n")
        return
    said = _read_outputs()
    # This interface keeps the interpreter's lock.
    fork = functools.partial(_fork_for_harness, ctypes.PyDLL(None), time)
    if not fork():
        channel.close()
        return
    try:
        channel.sendall(b"\n%d\n" % os.getpid())
        _serve(channel, said, fork)
        core.harness_machine_restart()
        take_over()
    except BaseException as error:
        os.write(2, ("harness: the copy of the program has failed: %r\n" % error).encode())
        os._exit(70)


def offer_now(find_core, take_over):
    """Offers copies once."""
    sys.modules["harness_effects"].stop()
    if os.environ.pop(_VARIABLE, None):
        try:
            _offer(find_core(), take_over)
        except (OSError, ImportError):
            pass  # Another process has offered copies, or harness has ended.


def offer_before_cuda(torch, find_core, take_over):
    """Makes torch offer copies before it initializes CUDA."""
    if not hasattr(getattr(torch, "_C", None), "_cuda_init"):
        return

    def offer():
        put_back()
        offer_now(find_core, take_over)

    put_back = guard.before(torch._C, "_cuda_init", offer)
