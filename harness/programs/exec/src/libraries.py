# What the hook knows of libraries that use the GPU without torch: their public statistics, and their errors if memory runs out.
# The statistics have the names of `torch.cuda.memory_stats`. What a library does not report is missing. `devices` are those from which the process
# requested memory.
import os
import sys

import harness_guard as guard

_ALLOCATED, _RESERVED = "allocated_bytes.all", "reserved_bytes.all"


def _named(found, names):
    """The statistics of one device under other names."""
    return {name: int(found[key]) for name, key in names.items() if found.get(key) is not None}


def _none(module, devices):
    """The statistics of a library that reports none."""
    return {}


class _Jax:
    NAME, MODULE, DISTRIBUTION, ALLOCATOR = "JAX", "jax", "jax", "XLA's BFC allocator"
    VARIABLE, OWN = "XLA_PYTHON_CLIENT_ALLOCATOR", ("", "default", "bfc")
    PACKAGES = ("jax", "jaxlib", "jax_plugins")

    @staticmethod
    def is_out_of_memory(error):
        return type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and str(error).startswith("RESOURCE_EXHAUSTED")

    @staticmethod
    def statistics(jax, devices):
        from jax._src import xla_bridge

        # Otherwise the question for devices would open them.
        if not xla_bridge.backends_are_initialized():
            return {}
        names = {_ALLOCATED + ".peak": "peak_bytes_in_use", _ALLOCATED + ".current": "bytes_in_use", _RESERVED + ".peak": "peak_pool_bytes"}
        # `jax.local_devices()` are those of the default backend, as the CPU with JAX_PLATFORMS=cpu,cuda.
        opened = [device for backend in xla_bridge.backends().values() for device in backend.local_devices() if device.platform == "gpu"]
        return {str(device.local_hardware_id): _named(device.memory_stats() or {}, names) for device in opened}


class _TensorFlow:
    NAME, MODULE, DISTRIBUTION, ALLOCATOR = "TensorFlow", "tensorflow", "tensorflow", "TensorFlow's BFC allocator"
    VARIABLE, OWN = "TF_GPU_ALLOCATOR", ("", "bfc")
    PACKAGES = ("tensorflow", "keras")

    @staticmethod
    def is_out_of_memory(error):
        return type(error).__name__ == "ResourceExhaustedError" and str(type(error).__module__).startswith("tensorflow.")

    # The peaks before the program's resets, by device.
    kept = {}

    @staticmethod
    def opened(tensorflow):
        from tensorflow.python.eager import context

        is_open = context.context()._initialized
        return [device.name.rpartition("device:")[2] for device in tensorflow.config.list_logical_devices("GPU")] if is_open else []

    @staticmethod
    def statistics(tensorflow, devices):
        names = {_ALLOCATED + ".peak": "peak", _ALLOCATED + ".current": "current"}
        of = tensorflow.config.experimental.get_memory_info
        return {name.rpartition(":")[2]: _named(of(name), names) for name in _TensorFlow.opened(tensorflow)}

    @staticmethod
    def restart_peaks(tensorflow):
        for name in _TensorFlow.opened(tensorflow):
            tensorflow.config.experimental.reset_memory_stats(name)

    @staticmethod
    def keep_peaks(module):
        """Keeps the peak of a device that the program is about to reset."""

        def keep_and_reset(reset, context, name):
            try:
                device, peak = name.rpartition(":")[2], context.get_memory_info(name)["peak"]
                _TensorFlow.kept[device] = max(peak, _TensorFlow.kept.get(device, 0))
            except Exception as error:  # There is no such device.
                guard.let_through(error)
            return reset(context, name)

        guard.wrap(module.Context, "reset_memory_stats", keep_and_reset)


class _CuPy:
    NAME, MODULE, DISTRIBUTION, ALLOCATOR = "CuPy", "cupy", "cupy", "CuPy's memory pool"
    PACKAGES = ("cupy", "cupyx", "cupy_backends")

    @staticmethod
    def is_out_of_memory(error):
        return type(error).__name__ == "OutOfMemoryError" and str(type(error).__module__).startswith("cupy.")

    @staticmethod
    def chosen(cupy):
        """The function that allocates, and its pool, `None` if it has none: a program can choose any function."""
        allocate = cupy.cuda.get_allocator()
        pool = getattr(allocate, "__self__", None)
        return allocate, pool if hasattr(pool, "used_bytes") else None

    @staticmethod
    def allocator(cupy):
        allocate, pool = _CuPy.chosen(cupy)
        if pool is None:
            return f"its allocator `{getattr(allocate, '__name__', type(allocate).__name__)}`"
        return _CuPy.ALLOCATOR if type(pool) is type(cupy.get_default_memory_pool()) else f"CuPy's {type(pool).__name__}"

    @staticmethod
    def statistics(cupy, devices):
        pools, found = {cupy.get_default_memory_pool(), _CuPy.chosen(cupy)[1]}, {}
        for device in devices if None not in pools else ():
            with cupy.cuda.Device(device):
                used, held = (sum(getattr(pool, name)() for pool in pools) for name in ("used_bytes", "total_bytes"))
                found[str(device)] = {_ALLOCATED + ".current": used, _RESERVED + ".current": held}
        return found


class _OnnxRuntime:
    # The arena, and calls of CUDA outside of it.
    _TEXTS = ("Failed to allocate memory", "out of memory")
    NAME, MODULE, DISTRIBUTION, ALLOCATOR = "ONNX Runtime", "onnxruntime", "onnxruntime-gpu", "ONNX Runtime's arena"
    PACKAGES = ("onnxruntime",)

    @staticmethod
    def is_out_of_memory(error):
        return str(type(error).__module__).startswith("onnxruntime.") and any(text in str(error) for text in _OnnxRuntime._TEXTS)

    statistics = staticmethod(_none)


class _CTranslate2:
    NAME, MODULE, DISTRIBUTION, ALLOCATOR = "CTranslate2", "ctranslate2", "ctranslate2", "its allocator"
    PACKAGES = ("ctranslate2",)

    @staticmethod
    def is_out_of_memory(error):
        return type(error) is RuntimeError and str(error).startswith("CUDA failed with error out of memory")

    statistics = staticmethod(_none)


class _Numba:
    NAME, MODULE, DISTRIBUTION, ALLOCATOR = "Numba", "numba.cuda", "numba-cuda", "plain calls of CUDA"
    PACKAGES = ("numba", "numba_cuda", "cuda")

    @staticmethod
    def is_out_of_memory(error):
        return type(error).__name__ == "CudaAPIError" and "CUDA_ERROR_OUT_OF_MEMORY" in str(error)

    statistics = staticmethod(_none)


class _Taichi:
    NAME, MODULE, DISTRIBUTION, ALLOCATOR = "Taichi", "taichi", "taichi", "its allocator"
    PACKAGES = ("taichi",)

    @staticmethod
    def is_out_of_memory(error):
        return type(error) is RuntimeError and "CUDA_ERROR_OUT_OF_MEMORY" in str(error)

    statistics = staticmethod(_none)


LIBRARIES = (_Jax, _TensorFlow, _CuPy, _OnnxRuntime, _CTranslate2, _Numba, _Taichi)


# How to keep peaks that a program resets, by module.
KEEPERS_OF_PEAKS = {"tensorflow.python.eager.context": _TensorFlow.keep_peaks}
# The names of modules whose import has succeeded.
_imported = set()
# How many of their out of memory errors have reached the program; None if that is unknown.
errors = None


def note_import(module):
    _imported.add(module.__name__)


def imported():
    """The libraries that this process has imported."""
    return [library for library in LIBRARIES if library.MODULE in _imported]


def published(devices):
    """The statistics that each imported library publishes, by its name, and the errors of those whose statistics cannot be read."""
    found, problems = {}, {}
    for library in imported() if devices else ():
        try:
            of = library.statistics(sys.modules[library.MODULE], devices)
        except Exception as error:
            problems[library.NAME] = str(error)
            continue
        of = {device: stats for device, stats in of.items() if stats}
        if of:
            found[library.NAME] = of
    return found, problems


def with_kept_peaks(published):
    """Raises the peaks to those of the whole process, also if the program reset them."""
    for device, peak in _TensorFlow.kept.items():
        stats = published.get(_TensorFlow.NAME, {}).get(device)
        if stats:
            stats[_ALLOCATED + ".peak"] = max(peak, stats[_ALLOCATED + ".peak"])
    return published


def is_in_use(published):
    """Whether a library with these statistics has allocated anything."""
    return any(any(stats.values()) for stats in published.values())


def sum_of(libraries):
    """The sum of the statistics of libraries. Of several, the peak of the sum is unknown, and what one does not report."""
    if len(libraries) < 2:
        return next(iter(libraries.values()), {})
    published = [set().union(*found.values()) for found in libraries.values()]
    names = {name for name in set.intersection(*published) if name.endswith(".current")}
    devices = {device for found in libraries.values() for device in found}
    return {device: {name: sum(found.get(device, {}).get(name, 0) for found in libraries.values()) for name in names} for device in devices}


def version(library):
    """Taichi's version is a tuple. That of Numba's GPU code is the version of its package, or of numba, which had the same code."""
    from importlib import metadata

    found = getattr(sys.modules[library.MODULE], "__version__", None)
    for package in (library.DISTRIBUTION, library.MODULE.partition(".")[0]):
        if not found:
            try:
                found = metadata.version(package)
            except metadata.PackageNotFoundError:
                found = ""
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


def allocator(library):
    """The name of the allocator of a library: another one if a variable or the program chooses it."""
    variable = getattr(library, "VARIABLE", None)
    value = os.environ.get(variable, "") if variable else ""
    if variable and value.lower() not in library.OWN:
        return f"{variable}={value}"
    if hasattr(library, "allocator"):
        try:
            return library.allocator(sys.modules[library.MODULE])
        except Exception as error:
            guard.let_through(error)
    return library.ALLOCATOR


def is_out_of_memory(error):
    return any(library.is_out_of_memory(error) for library in LIBRARIES)


_STANDARD = os.path.dirname(os.__file__) + os.sep
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Shows that an error was counted. It stays if the error is raised again.
_COUNTED = "_harness_counted"


def _is_of_program(file):
    """Whether a source file is neither of a library nor of Python."""
    if file.startswith((_OWN, "<frozen ")):
        return False
    _, installed, package = file.rpartition(os.sep + "site-packages" + os.sep)
    if installed:
        return package.split(os.sep)[0] not in _PACKAGES
    # Names of Cython's files begin with the package.
    return not file.startswith(_STANDARD) and file.split(os.sep)[0] not in _PACKAGES


_PACKAGES = frozenset(package for library in LIBRARIES for package in library.PACKAGES)


def stack_of_new_error(error, frame=None):
    """Returns the frames of the program, innermost first, if an out of memory error of a library has reached the program for the first time. `frame` handles it."""
    if not is_out_of_memory(error) or _COUNTED in error.__dict__:
        return None
    found, trace = [], error.__traceback__
    while trace is not None:
        found.insert(0, (trace.tb_frame.f_code, trace.tb_lineno))
        trace = trace.tb_next
    if not any(_is_of_program(code.co_filename) for code, _ in found):
        return None
    error.__dict__[_COUNTED] = True
    frame = frame and frame.f_back
    while frame is not None:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return [{"file": code.co_filename, "line": line or 0, "name": code.co_name} for code, line in found if _is_of_program(code.co_filename)]


def count_error():
    global errors
    if errors is not None:
        errors += 1


def forget():
    """Begins anew in a child, whose figures are not those of its parent."""
    global errors
    _TensorFlow.kept.clear()
    if errors is not None:
        errors = 0


def watch_handled_errors(then):
    """Calls `then` with each exception that Python code handles, and the frame, and begins to count errors. Python before 3.12 does not show them."""
    global errors
    monitoring = getattr(sys, "monitoring", None)
    free = [tool for tool in (4, 3) if monitoring and monitoring.get_tool(tool) is None]
    if errors is not None or not free:
        return
    errors = 0
    monitoring.use_tool_id(free[0], "harness")
    handled = monitoring.events.EXCEPTION_HANDLED
    monitoring.register_callback(free[0], handled, guard.entry(lambda code, offset, error: then(error, guard.caller())))
    monitoring.set_events(free[0], handled)
    # When the interpreter ends, it closes generators. Then our function fails, and Python 3.12 calls it again without end.
    guard.at_exit(lambda: monitoring.set_events(free[0], 0))


def with_device_files(module):
    """JAX opens the GPU only if one of these files exists. The simulated GPU has none."""
    guard.wrap(module, "has_visible_nvidia_gpu", lambda look: True)


# The modules of cuda.bindings with the C functions of the runtime, which their `__pyx_capi__` exports: before and since version 13.5.
RUNTIME_BINDINGS = tuple(
    "cuda.bindings." + module + ending for module in ("_bindings.cyruntime", "_internal.runtime") for ending in ("", "_ptds")
)


def with_simulated_runtime(module):
    """Replaces the CUDA runtime that cuda.bindings has linked in without symbols. Other modules import its C functions from `module`, after this change."""
    import ctypes

    release = sys.modules["cuda.bindings"].__version__.partition(".")[0]
    path = os.path.join(os.environ["HARNESS_GPU_LIBRARIES"], "libcudart.so." + release)
    if not os.path.exists(path):
        return
    runtime, api = ctypes.CDLL(path), ctypes.pythonapi
    api.PyCapsule_GetName.argtypes, api.PyCapsule_GetName.restype = [ctypes.py_object], ctypes.c_void_p
    api.PyCapsule_New.argtypes, api.PyCapsule_New.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p], ctypes.py_object
    ending = "_ptds" if module.__name__.endswith("_ptds") else ""
    functions = module.__pyx_capi__
    for name in [name for name in functions if name.startswith("_cuda")]:
        names = [name[1:] + ending for ending in (("_ptsz", "_ptds", "") if ending else ("",))]
        found = next((name for name in names if hasattr(runtime, name)), None)
        if found:
            address = ctypes.cast(getattr(runtime, found), ctypes.c_void_p)
            # The name is the type of the function, a string of the module.
            functions[name] = api.PyCapsule_New(address, api.PyCapsule_GetName(functions[name]), None)
