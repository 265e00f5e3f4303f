# Computes the values of small tensors on a simulated GPU, whose kernels are no-ops: `harness exec --values small`. Operations on tensors of at most
# 64 KiB also run on the CPU, and the program reads back those values. Large tensors count as zeros.
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

_LARGEST = 64 << 10
# Number of copies before the copies of freed storages are dropped.
_FIRST_SWEEP = 4096


class SmallValues(TorchDispatchMode):
    """Keeps a CPU copy of each small storage of the GPU, and repeats the program's operations on the copies. Operations allocate the same memory as before,
    with one exception: under any dispatch mode, PyTorch's backward pass accumulates gradients in new memory instead of in place."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.copies = {}  # by the address of the storage: a weak reference, and its copy
        self.sweep_at = _FIRST_SWEEP
        self.random_state = torch.get_rng_state()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not isinstance(operation, torch._ops.OpOverload):
            return operation(*args, **kwargs)  # A higher-order operator, such as flex_attention, calls its functions without this mode.
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        try:
            result = operation(*args, **kwargs)
        except RuntimeError as error:
            return self._despite(error, operation, args, kwargs, inputs)
        outputs = [leaf for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor)]
        if not any(tensor.is_cuda for tensor in inputs + outputs):
            return result
        known = {_address(tensor) for tensor in inputs}
        if all(map(_is_small, inputs + outputs)):
            try:
                computed = self._compute(operation, args, kwargs)
            except Exception:  # The CPU lacks some operations of the GPU.
                return result
            return self._take_over(operation, result, computed, known)
        self._forget(operation, args, kwargs)
        return result

    def _despite(self, error, operation, args, kwargs, inputs):
        """Handles operations such as `torch.normal`, which check values on the GPU and refuse zeros. Returns the CPU's result if the CPU accepts the values."""
        others = isinstance(error, (torch.OutOfMemoryError, NotImplementedError)) or "not implemented" in str(error)
        if others or operation._schema.is_mutable or not inputs or not all(tensor.is_cuda and _is_small(tensor) for tensor in inputs):
            raise error
        try:
            computed = self._compute(operation, args, kwargs)
        except Exception:
            raise error from None

        def on_gpu(tensor):
            created = torch.empty_like(tensor, device=inputs[0].device)
            self._copy_of(created).copy_(tensor)
            return created

        return tree_map_only(torch.Tensor, on_gpu, computed)

    def _compute(self, operation, args, kwargs):
        def on_cpu(leaf):
            if isinstance(leaf, torch.Tensor):
                return self._copy_of(leaf) if leaf.is_cuda else leaf
            return torch.device("cpu") if leaf.type == "cuda" else leaf

        args, kwargs = tree_map_only((torch.Tensor, torch.device), on_cpu, (args, kwargs))
        if torch.Tag.nondeterministic_seeded not in operation.tags:
            return operation(*args, **kwargs)
        # Must not change the program's random numbers on the CPU.
        kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
        program_state = torch.get_rng_state()
        torch.set_rng_state(self.random_state)
        try:
            return operation(*args, **kwargs)
        finally:
            self.random_state = torch.get_rng_state()
            torch.set_rng_state(program_state)

    def _take_over(self, operation, result, computed, known):
        """Returns the program's tensors, with their contents copied from `computed`, or the computed value if it depends on contents."""
        if isinstance(result, (tuple, list)):
            return type(result)(self._take_over(operation, *pair, known) for pair in zip(result, computed))
        if not isinstance(result, torch.Tensor):
            return computed if torch.Tag.data_dependent_output in operation.tags else result
        if _address(result) in known:
            return result  # An input or a view of it; its copy is up to date.
        if result.shape != computed.shape and torch.Tag.dynamic_output_shape in operation.tags:
            # The output's shape depends on the values.
            result = torch.empty(computed.shape, dtype=result.dtype, device=result.device)
        if result.shape == computed.shape:
            (self._copy_of(result) if result.is_cuda else result).copy_(computed)
        return result

    def _forget(self, operation, args, kwargs):
        """Zeroes the copies of small tensors that an operation on large tensors writes: their values are unknown."""
        arguments = zip(operation._schema.arguments, args + tuple(kwargs.get(argument.name) for argument in operation._schema.arguments[len(args) :]))
        written = [value for argument, value in arguments if argument.alias_info is not None and argument.alias_info.is_write]
        for tensor in tree_iter(written):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda and _is_small(tensor):
                self._copy_of(tensor).zero_()

    def _copy_of(self, tensor):
        """Returns a view of the copy with the tensor's offset, size and strides."""
        storage = tensor.untyped_storage()
        reference, copy = self.copies.get(storage._cdata, (None, None))
        if reference is None or reference.expired() or copy.nbytes() != storage.nbytes():
            if len(self.copies) >= self.sweep_at:
                self.copies = {address: kept for address, kept in self.copies.items() if not kept[0].expired()}
                self.sweep_at = max(_FIRST_SWEEP, 2 * len(self.copies))
            copy = _read(storage)
            self.copies[storage._cdata] = StorageWeakRef(storage), copy
        view = torch.empty(0, dtype=tensor.dtype).set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())
        return view.conj() if tensor.is_conj() else view


def _read(storage):
    """Reads the storage's contents: data copied to the GPU outside of operations, as by `torch.tensor`, else zeros. Does not wait, since that could complete events."""
    contents = torch.zeros(storage.nbytes(), dtype=torch.uint8)
    if storage.nbytes() and not torch.cuda.is_current_stream_capturing():
        contents.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), non_blocking=True)
    return contents.untyped_storage()


def _address(tensor):
    return tensor.untyped_storage()._cdata if _is_plain(tensor) else id(tensor)


def _is_plain(tensor):
    """Returns whether the tensor is strided, not nested and not quantized."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def _is_small(tensor):
    if not _is_plain(tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return not tensor.is_cuda or tensor.untyped_storage().nbytes() <= _LARGEST


def begin():
    """Activates the mode in the calling thread and its backward passes."""
    mode = SmallValues()
    mode.__enter__()
    # Torch disables modes while it prints tensors.
    print_tensor = torch._tensor_str._str_intern

    def print_with_values(*args, **kwargs):
        with mode:
            return print_tensor(*args, **kwargs)

    torch._tensor_str._str_intern = print_with_values
