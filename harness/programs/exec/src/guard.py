# The only way in which code of ours enters a program. Whatever Python, PyTorch, another library or the program calls of it goes through `entry`, `around`
# or a function below that uses them.
# - An exception of ours ends here. The folder of the run gets its place once, and the program's call goes on as without us.
# - Exceptions of a function that one of ours wraps pass unchanged, and so do those of the program's signal handlers, which may run within ours.
import functools
import os
import sys
import types
from io import open  # The program may replace that of `builtins`.

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Later places of exceptions of ours are not noted.
_MOST_PLACES = 16
# Functions and objects of Python that the library uses, in the order of `Python` in python.rs.
_NEEDED = (
    "PySys_AddAuditHook",
    "PyObject_CallFunction",
    "PyObject_Vectorcall",
    "PyErr_ExceptionMatches",
    "PyErr_Clear",
    "Py_IncRef",
    "Py_DecRef",
    "PyInterpreterState_Get",
    "PyThreadState_Get",
    "PyThreadState_EnterTracing",
    "PyThreadState_LeaveTracing",
    "Py_GetRecursionLimit",
    "Py_SetRecursionLimit",
    "PyExc_RecursionError",
    "_Py_NoneStruct",
)
# METH_FASTCALL | METH_KEYWORDS
_WITH_KEYWORDS = 0x82
# The library of the simulated GPU, and what its functions refer to.
_library, _kept = None, []
_noted = set()
# The folder of the run.
folder = os.environ.get("HARNESS_GPU_RUN")


def caller():
    """The innermost frame of the program; None if no Python code called ours."""
    frame = sys._getframe(1)
    # The code of a frame takes longer: Python raises an audit event for it.
    while frame is not None and str(frame.f_globals.get("__file__")).startswith(_HERE):
        frame = frame.f_back
    return frame


def _codes_of_handlers():
    """The code of the program's signal handlers."""
    import signal

    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        handler = handler if hasattr(handler, "__code__") or hasattr(handler, "__func__") else getattr(type(handler), "__call__", None)
        yield getattr(getattr(handler, "__func__", handler), "__code__", None)


def _has_interrupted(frame):
    """Whether a frame is that of a signal handler. Python passes it the frame that it interrupts. A handler that replaces itself is no longer registered."""
    values = () if frame.f_code.co_filename.startswith(_HERE) else frame.f_locals.values()
    passed = (each for value in values for each in (value if type(value) is tuple else (value,)))
    return frame.f_back is not None and any(each is frame.f_back for each in passed)


def _is_of_program(error):
    """Whether a signal handler of the program raised an exception, while code of ours ran."""
    handlers, trace = set(_codes_of_handlers()) - {None}, error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in handlers and not _has_interrupted(trace.tb_frame):
        trace = trace.tb_next
    return trace is not None


def let_through(error):
    """Raises an exception that code of ours has caught, if it is of the program."""
    if _is_of_program(error):
        raise error


def as_json(value):
    """The JSON of a value. Bytes of file names that are no text become question marks."""
    import json

    # The locale may choose another encoding than UTF-8 for a file, so the result has only ASCII.
    return json.dumps(json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace")))


def note(error):
    """Notes where code of ours has failed."""
    import json

    trace, own = error.__traceback__, None
    while trace is not None:
        code = trace.tb_frame.f_code
        own = trace if code.co_filename.startswith(_HERE) and code.co_filename != note.__code__.co_filename else own
        trace = trace.tb_next
    if own is None:
        return
    code = own.tb_frame.f_code
    place = os.path.basename(code.co_filename), own.tb_lineno, code.co_name, type(error).__name__
    if place in _noted or len(_noted) >= _MOST_PLACES:
        return
    _noted.add(place)
    with open(os.path.join(folder, "own-errors-%d.jsonl" % os.getpid()), "a") as file:
        file.write(json.dumps({"error": place[3], "file": place[0], "line": place[1], "name": place[2]}) + "\n")


def _ends(error):
    """Returns whether an exception ends here. Exceptions that no code of ours raises, such as KeyboardInterrupt, do not."""
    if not isinstance(error, Exception):
        return False
    for _ in range(8):
        try:
            return not _is_of_program(error)
        except Exception as another:
            error = another  # A signal handler of the program interrupts this, too.
    return True  # The limit of recursions, or the end of the interpreter.


def _note_ended(error):
    try:
        note(error)
    except Exception:
        pass  # A full disk, or as in `_ends`.


def entry(function, otherwise=None):
    """Returns a function that calls ours, and returns `otherwise` if that fails."""
    ends, note_ended = _ends, _note_ended  # At the interpreter's end this module's names become None.

    @functools.wraps(function)
    def guarded(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            try:
                is_end = ends(error)
                if is_end:
                    note_ended(error)
            except RecursionError:
                is_end = True  # The program has left no frame for more.
            if not is_end:
                raise
        return otherwise

    return guarded


class _Original:
    """The function that one of ours wraps, during one call. Has no `__init__`: the program may have left no frame for one."""

    function = result = error = trace = context = None
    is_called = False

    def __call__(self, *args, **kwargs):
        self.is_called, self.error = True, None
        try:
            self.result = self.function(*args, **kwargs)
        except BaseException as error:
            self.error, self.trace, self.context = error, error.__traceback__.tb_next, error.__context__
            raise
        return self.result


def around(function, ours):
    """Returns a function that calls ours with the wrapped one and the program's arguments. If ours fails, the program gets what the wrapped one returned or
    raised; if ours had not called it yet, it is called then. If both fail, the arguments are wrong."""
    ends, note_ended, original_of = _ends, _note_ended, _Original  # As in `entry`.

    @functools.wraps(function)
    def guarded(*args, **kwargs):
        original = original_of()
        original.function = function
        try:
            try:
                return ours(original, *args, **kwargs)
            except BaseException as error:
                if error is original.error:
                    # Without frames of ours.
                    error.__traceback__ = original.trace
                    raise
                try:
                    is_end = ends(error)
                    if is_end and original.is_called:
                        note_ended(error)
                except RecursionError:
                    is_end = True
                if not is_end:
                    raise
                failure = error
            try:
                if original.error is not None:
                    raise original.error
                if original.is_called:
                    return original.result
                # Without a frame of `_Original`: the program may have left none.
                result = function(*args, **kwargs)
            except BaseException as error:
                if original.is_called:
                    error.__traceback__, error.__context__ = original.trace, original.context
                else:
                    error.__traceback__ = error.__traceback__.tb_next
                raise
            try:
                note_ended(failure)
            except RecursionError:
                pass
            return result
        finally:
            # An exception that a frame of its own traceback holds would keep the program's tensors.
            original.error = original.trace = original.context = failure = None

    return guarded


def begin(path):
    """Finds the functions of the library at `path`. Pythons before 3.11 and GPUs that are not simulated lack them."""
    global _library
    try:
        import ctypes

        library = ctypes.PyDLL(path)
        needed = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in _NEEDED]
        library.harness_python_begin((ctypes.c_void_p * len(needed))(*needed))
        library.harness_python_function.restype, library.harness_python_events_begin.restype = ctypes.c_void_p, ctypes.c_bool
        _library = library
    except (ImportError, AttributeError):
        pass


def _for_library(ours, failed):
    """Guards a function of ours that the library calls, and the function that it may return. If ours fails, the library gets what `failed` returns for the
    exception."""
    ends, entry_of = _ends, entry  # As in `entry`.

    def guarded(*args, **kwargs):
        try:
            after = ours(*args, **kwargs)
            return after and entry_of(after)
        except RecursionError:
            raise  # The library repeats the call, with more frames.
        except BaseException as error:
            if not ends(error):
                raise
            return failed(error)

    return guarded


def _function_of_c(function, ours):
    """Returns a function of C that calls ours, then the given one. To the program it is the given one: it needs no frame, becomes no method of classes that
    have it as an attribute, and pickles by its name. None if the library has no more such functions."""
    if not _library:
        return None
    import ctypes

    partial, note_ended = functools.partial, _note_ended
    guarded = _for_library(ours, lambda error: partial(note_ended, error))
    code = _library.harness_python_function(ctypes.py_object(guarded), ctypes.py_object(function))
    if not code:
        return None

    class Definition(ctypes.Structure):
        _fields_ = [("name", ctypes.c_char_p), ("code", ctypes.c_void_p), ("flags", ctypes.c_int), ("documentation", ctypes.c_char_p)]

    signature = "%s%s\n--\n\n" % (function.__name__, function.__text_signature__) if function.__text_signature__ else ""
    texts = function.__name__.encode(), (signature + (function.__doc__ or "")).encode()
    definition = Definition(texts[0], code, _WITH_KEYWORDS, texts[1] or None)
    _kept.append(definition)
    create = ctypes.pythonapi.PyCFunction_NewEx
    # A prototype of its own: the program may use the same function.
    create = ctypes.PYFUNCTYPE(*[ctypes.py_object, ctypes.c_void_p] + 2 * [ctypes.py_object])(ctypes.cast(create, ctypes.c_void_p).value)
    return create(ctypes.addressof(definition), function.__self__, function.__module__)


def _like_builtin(function, guarded):
    """Without the library: as `_function_of_c`, but it needs frames."""
    members = {
        "__call__": staticmethod(guarded),
        "__class__": property(lambda self: type(function)),
        "__doc__": function.__doc__,
        "__getattr__": lambda self, name: getattr(function, name),
        "__module__": function.__module__,
        "__reduce__": lambda self: function.__name__,
        "__repr__": lambda self: repr(function),
    }
    return type(type(function).__name__, (), members)()


def _of_module(module, function):
    """The names under which a module, and the one that defines the function, have it."""
    modules = module, sys.modules.get(function.__module__, module)
    return [(each, name) for each in modules for name, value in list(vars(each).items()) if value is function]


def wrap(owner, name, ours):
    """Replaces a function or method of a module or class by one `around` it. Returns a function that puts it back."""
    function = getattr(owner, name)
    return _put(around(function, ours), [(owner, name)], function)


def before(owner, name, ours):
    """Calls ours before a function or method of a module or class, with the same arguments. If ours returns a function, calls that after a call that succeeds.
    Returns a function that ends this."""
    function = getattr(owner, name)

    def ours_and_function(original, *args, **kwargs):
        after = ours(*args, **kwargs)
        result = original(*args, **kwargs)
        if after:
            after()
        return result

    if not isinstance(owner, types.ModuleType) or not isinstance(function, types.BuiltinFunctionType):
        return wrap(owner, name, ours_and_function)
    replacing = _function_of_c(function, ours) or _like_builtin(function, around(function, ours_and_function))
    for supporting in [value for value in vars(owner).values() if owner is os and isinstance(value, set) and function in value]:
        supporting.remove(function)
        supporting.add(replacing)
    return _put(replacing, _of_module(owner, function), function)


def _put(guarded, places, function):
    """Puts ours at some places. Returns a function that puts another back."""

    def put(function):
        for place in places:
            setattr(*place, function)

    put(guarded)
    return functools.partial(put, function)


def replace(owner, name, guarded):
    """Replaces a function by one `around` it, or a class by one with such methods."""
    setattr(owner, name, guarded)


def at_fork(function):
    """Calls a function in each process that this one forks."""
    os.register_at_fork(after_in_child=entry(function))


def at_exit(function):
    """Calls a function when the interpreter ends, before those that were registered earlier."""
    import atexit

    atexit.register(entry(function))


def when_cuda_begins(module, function):
    """Calls a function once torch initializes CUDA. `module` is `torch.cuda`."""
    module._lazy_call(entry(function))


def start_thread(function):
    """Starts a thread that the program neither waits for nor counts. Returns a function that waits for its end."""
    import _thread

    running = _thread.allocate_lock()

    def run():
        try:
            function()
        finally:
            running.release()

    running.acquire()
    _thread.start_new_thread(entry(run), ())
    return running.acquire


def callback(function, otherwise=False):
    """Returns a function that C calls, which returns a truth value. The caller keeps it as long as C may call it."""
    import ctypes

    return ctypes.CFUNCTYPE(ctypes.c_bool)(entry(function, otherwise))


def on_events(function, names):
    """Calls a function with the audit events of these names. The library chooses them: Python takes longer for that than PyTorch for many operations."""
    has_begun = False
    if _library:
        import ctypes

        has_begun = _library.harness_python_events_begin(ctypes.py_object(_for_library(function, _note_ended)), "\n".join(sorted(names)).encode())
    if not has_begun:
        # Also in further interpreters of a process: the library's hook belongs to the first.
        hook = entry(function)
        sys.addaudithook(lambda event, arguments, names=frozenset(names): hook(event, arguments) if event in names else None)


class _Finder:
    """Finds modules for `import`."""

    def __init__(self, find):
        self.find_spec = entry(find)


def before_import(function):
    """Calls a function with the name of each module that the program imports."""
    sys.meta_path.insert(0, _Finder(lambda name, path=None, target=None: function(name)))


def on_import(module, then):
    """Calls a function with a module after its execution."""

    def execute(original, executed):
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        original(executed)
        then(executed)

    def find(name, path=None, target=None):
        if name != module:
            return None
        # A search does not always lead to an import, so this finder stays until the module is executed.
        found = (other.find_spec(name, path, target) for other in sys.meta_path if other is not finder and hasattr(other, "find_spec"))
        try:
            spec = next((spec for spec in found if spec is not None), None)
        except Exception:
            return None  # Python asks the others next, which report their own errors.
        if spec is not None and hasattr(spec.loader, "exec_module"):
            entry(wrap)(spec.loader, "exec_module", execute)
        return spec

    finder = _Finder(find)
    sys.meta_path.insert(0, finder)
