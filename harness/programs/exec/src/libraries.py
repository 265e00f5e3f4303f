# What the hook knows of libraries that use the GPU without torch: their public statistics, and their errors if memory runs out.
# The statistics have the names of `torch.cuda.memory_stats`. What a library does not report is missing. `devices` are those from which the process
# requested memory.
import sys

_ALLOCATED, _RESERVED = "allocated_bytes.all", "reserved_bytes.all"


def _named(found, names):
    """The statistics of one device under other names."""
    return {name: int(found[key]) for name, key in names.items() if found.get(key) is not None}


class _Jax:
    NAME, MODULE, DISTRIBUTION, ALLOCATOR = "JAX", "jax", "jax", "XLA's BFC allocator"

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
        opened = [device for device in jax.local_devices() if device.platform == "gpu"]
        return {str(device.local_hardware_id): _named(device.memory_stats() or {}, names) for device in opened}


class _TensorFlow:
    NAME, MODULE, DISTRIBUTION, ALLOCATOR = "TensorFlow", "tensorflow", "tensorflow", "TensorFlow's BFC allocator"

    @staticmethod
    def is_out_of_memory(error):
        return type(error).__name__ == "ResourceExhaustedError" and str(type(error).__module__).startswith("tensorflow.")

    @staticmethod
    def statistics(tensorflow, devices):
        from tensorflow.python.eager import context

        if not context.context()._initialized:
            return {}
        opened = [device.name.rpartition("device:")[2] for device in tensorflow.config.list_logical_devices("GPU")]
        names = {_ALLOCATED + ".peak": "peak", _ALLOCATED + ".current": "current"}
        return {name.rpartition(":")[2]: _named(tensorflow.config.experimental.get_memory_info(name), names) for name in opened}


class _CuPy:
    NAME, MODULE, DISTRIBUTION, ALLOCATOR = "CuPy", "cupy", "cupy", "CuPy's memory pool"

    @staticmethod
    def is_out_of_memory(error):
        return type(error).__name__ == "OutOfMemoryError" and str(type(error).__module__).startswith("cupy.")

    @staticmethod
    def statistics(cupy, devices):
        pool, found = cupy.get_default_memory_pool(), {}
        for device in devices:
            with cupy.cuda.Device(device):
                found[str(device)] = {_ALLOCATED + ".current": pool.used_bytes(), _RESERVED + ".current": pool.total_bytes()}
        return found


class _OnnxRuntime:
    NAME, MODULE, DISTRIBUTION, ALLOCATOR = "ONNX Runtime", "onnxruntime", "onnxruntime-gpu", "ONNX Runtime's arena"

    @staticmethod
    def is_out_of_memory(error):
        return str(type(error).__module__).startswith("onnxruntime.") and "Failed to allocate memory" in str(error)

    @staticmethod
    def statistics(onnxruntime, devices):
        return {}


LIBRARIES = (_Jax, _TensorFlow, _CuPy, _OnnxRuntime)


def imported():
    """The libraries that this process has imported."""
    return [library for library in LIBRARIES if hasattr(sys.modules.get(library.MODULE), "__version__")]


def is_out_of_memory(error):
    return any(library.is_out_of_memory(error) for library in LIBRARIES)


def with_device_files(module):
    """JAX opens the GPU only if one of these files exists. The simulated GPU has none."""
    module.has_visible_nvidia_gpu = lambda: True
