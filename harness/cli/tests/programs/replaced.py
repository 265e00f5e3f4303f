"""Prints what a program can see of functions that the hook of `harness exec` replaces: the same as without the hook."""
import copy
import inspect
import multiprocessing
import os
import pickle
import posix
import signal
import subprocess
import sys
import threading
import traceback
import types
import unittest

FUNCTIONS = sys.exit, os._exit, os.execv, os.execve, os.mkfifo, os.mknod, threading.excepthook


class Interrupted(Exception):
    pass


class Last:
    """Ends with the interpreter, when names of modules are None."""

    def __del__(self, exit=sys.exit, write=os.write):
        try:
            exit(4)
        except SystemExit:
            write(1, b"the last exit\n")


def error_of(call, *args, **kwargs):
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
        return frames, repr(error), repr(error.__context__), repr(error.__cause__)


def exits_while_it_handles(*args):
    try:
        raise KeyError("first")
    except KeyError:
        sys.exit(*args)


def at_depth(frames, call, left):
    return call(left) if frames == 0 else at_depth(frames - 1, call, left)


def least_frames(call):
    """The least number of frames below the limit with which a call has no RecursionError."""
    limit = sys.getrecursionlimit()
    for left in range(1, 40):
        try:
            at_depth(limit - left, call, left)
        except RecursionError:
            continue
        except SystemExit:
            pass
        return left


def replace_and_raise(number, frame):
    signal.signal(number, signal.SIG_DFL)
    raise Interrupted


def interrupted_exits():
    """How many of the exits end in another exception than that of the handler, which is raised before the exit."""

    class Status(int):
        """Raises the signal where the hook looks at the status."""

        def __eq__(self, other):
            raised.append(self)
            signal.raise_signal(signal.SIGALRM)
            return False

        __hash__ = int.__hash__

    def interrupt(number, frame):
        raise Interrupted

    find = signal.valid_signals

    def interrupted():
        """Raises the signal again where the hook looks at the exception of the handler."""
        signal.valid_signals = find
        signal.raise_signal(signal.SIGALRM)

    for handler, signal.valid_signals in (replace_and_raise, find), (lambda *given: replace_and_raise(*given), find), (interrupt, interrupted):
        raised = []
        signal.signal(signal.SIGALRM, handler)
        try:
            sys.exit(Status(3))
        except Interrupted:
            yield 0
        except SystemExit:
            # Without the hook, nothing looks at the status.
            yield len(raised)


def exit_code_of(end):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        end()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def execute_by_descriptor():
    os.execve(os.open("/bin/sh", os.O_RDONLY), ["sh", "-c", "exit 8"], os.environ)


def traced_functions():
    """The functions of Python that a trace function sees while the program opens a file and exits."""
    names = []
    sys.settrace(lambda frame, event, value: names.append(frame.f_code.co_name))
    open(os.devnull, "w").close()
    try:
        sys.exit(3)
    except SystemExit:
        pass
    sys.settrace(None)
    return names


class Path:
    """Prints what code of the program can see that a replaced function calls."""

    def __fspath__(self):
        names = [frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._getframe())]
        print(names, sys.getrecursionlimit(), sys.gettrace() is None)
        sys.setrecursionlimit(150)
        return "/nowhere/fifo"


def with_path():
    names, limit = [], sys.getrecursionlimit()
    sys.settrace(lambda frame, event, value: names.append(frame.f_code.co_name))
    error_of(os.mkfifo, Path())
    sys.settrace(None)
    changed = sys.getrecursionlimit()
    sys.setrecursionlimit((1 << 31) - 1)
    error_of(sys.exit)
    largest = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    return names, changed, largest


class Names:
    exit, end, hook = sys.exit, os._exit, threading.excepthook


def main():
    for function in FUNCTIONS:
        print(repr(function), function.__module__, inspect.signature(function) if function.__text_signature__ else None)
        print(pickle.loads(pickle.dumps(function)) is function, copy.deepcopy(function) is function, isinstance(function, types.BuiltinFunctionType))
        print(getattr(sys.modules[function.__module__], function.__name__) is function, {function: 1}[function])
    print(os.execve in os.supports_fd, os.mkfifo in os.supports_dir_fd, len(os.supports_dir_fd), posix._exit is os._exit)
    print(threading.excepthook is threading.__excepthook__)
    print(error_of(Names().exit, 3), error_of(Names().end, "text"), error_of(Names().hook, 3))
    for args in ((), (None,), (3,), ("text",), ((1, 2),), (1, 2)):
        print(error_of(sys.exit, *args), error_of(exits_while_it_handles, *args))
    print(error_of(sys.exit, status=3), error_of(os._exit), error_of(os._exit, 1 << 80), error_of(os.execv, "/nowhere", ["nowhere"]))
    print(error_of(os.execve, "/bin/true", ["true"], 5), error_of(os.execvp, "a-program-that-no-folder-has", ["program"])[1:])
    print(traced_functions(), with_path())
    result = unittest.TestResult()
    for call, *args in (result.addError, 1, 2), (result.addSubTest, 1), (os.mkfifo, 3), (os.mknod,), (os.mkfifo, None):
        print(error_of(call, *args))
    print(error_of(lambda: subprocess.Popen(["true"], env=5))[1])
    limit = sys.getrecursionlimit()
    print(least_frames(lambda left: sys.exit(5)), least_frames(lambda left: os.utime(".")), sys.getrecursionlimit() == limit)
    print(exit_code_of(lambda: least_frames(os._exit)))
    print(sum(interrupted_exits()))
    print(exit_code_of(execute_by_descriptor), exit_code_of(lambda: os._exit(status=7)))
    process = multiprocessing.get_context("spawn").Process(target=os._exit, args=[6])
    process.start()
    process.join()
    print(process.exitcode)
    threading.Last = Last()
    sys.stdout.flush()
    sys.exit(3)


if __name__ == "__main__":
    main()
