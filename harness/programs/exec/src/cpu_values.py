# Computes on the CPU what a program computes on a simulated GPU, whose kernels are no-ops: `harness exec --values cpu`.
#
# Each operation of PyTorch runs twice: on the GPU, which allocates what a real GPU would, and then on the CPU. The library of the simulated GPU keeps
# the contents of its memory in host memory, so the CPU works on tensors with the same bytes, offset and strides ("aliases").
#
# The library runs most operations on small dense tensors without Python, once the CPU has accepted arguments of their types here.
#
# The operations arrive through kernels for two dispatch keys that torch itself does not use. `Fake` lies below autograd and above the handlers of
# modes and of subclasses of tensors; `CustomRNGKeyId` lies below these and above the GPU. Unlike a mode, a key is invisible to autograd, so
# gradients accumulate in place as they do without it. An operation without such a kernel, for example of an extension, is not computed, and its
# launches are counted.
import collections
import contextlib
import ctypes
import functools
import operator
import sys
import threading

import harness_guard as guard
import harness_random_numbers as random_numbers
import harness_torch_kernel as torch_kernel
import torch
from torch import library as torch_library

_C = torch._C
_KEYS = "Fake", "CustomRNGKeyId"
_KEY, _INNER_KEY = map(_C._dispatch_key_parse, _KEYS)
_DEFAULT_KEYS = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_LISTS = tuple, list
_NUMBERS = bool, int, float
# Arguments that the CPU takes as they are.
_AS_THEY_ARE = frozenset((*_NUMBERS, type(None), torch.dtype, torch.memory_format))
_HALVES = torch.float16, torch.bfloat16
_MOST_ALIASES = 1 << 14
# Outputs of at least this size are checked against the limit of host memory.
_CHECKED = 1 << 20
# Functions of libc10.so: whether a dispatch key of a thread is included, and include it.
_KEY_FUNCTIONS = "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE", "_ZN3c104impl29tls_set_dispatch_key_includedENS_11DispatchKeyEb"
# Operations that compute nothing, that change the storage of a tensor, or that consist of others.
_WITHOUT_VALUES = """
_unsafe_view empty_like empty_permuted new_empty new_empty_strided is_pinned _pin_memory record_stream set_ resize_ resize_as_ _resize_output_
as_strided_ detach_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_ _nested_tensor_from_mask _nested_tensor_from_mask_left_aligned
_cudnn_rnn_flatten_weight _use_cudnn_ctc_loss _transformer_encoder_layer_fwd _transform_bias_rescale_qkv sparse_coo_tensor sparse_compressed_tensor _sparse_coo_tensor_unsafe
rand rand_like randn randn_like randint randint_like bernoulli normal.float_float normal_functional cauchy exponential geometric log_normal random uniform
dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_
scaled_dot_product_attention lstm gru rnn_relu rnn_tanh
_coalesced_ _sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors _sparse_compressed_tensor_unsafe _sparse_compressed_tensor_with_dims
""".split()
# The CPU writes the results of these operations, and of element-wise ones, directly into the alias. Others may resize their output on the way.
_WRITTEN_IN_PLACE = "mm", "addmm", "bmm", "baddbmm", "sum"
# The CPU refuses to divide integers by zero.
_DIVISIONS = "div", "div_", "floor_divide", "floor_divide_", "remainder", "remainder_", "fmod", "fmod_"
# On the CPU, operations with these prefixes check the values of their arguments.
_REFUSE_VALUES = "linalg", "_linalg", "cholesky", "_cholesky", "lu_", "_lu_", "_assert"
# For tensors of equal types, these substitutes do what the CPU's operations do.
_SOFTMAX = "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"
_registrations = []  # They last as long as these objects.
_SEED_MASK = (1 << 63) - 1


def _include(is_included, is_inner_included):
    _C._dispatch_tls_set_dispatch_key_included(_KEY, is_included)
    _C._dispatch_tls_set_dispatch_key_included(_INNER_KEY, is_inner_included)


def _with_values(function, *args, **kwargs):
    """Calls a function after this has included the keys in its thread."""
    _include(True, True)
    return function(*args, **kwargs)


class NotComputed(Exception):
    """The CPU cannot compute an operation."""


class _Kind:
    """What is known of an operation from its schema."""

    def __init__(self, operation):
        schema, tags = operation._schema, operation.tags
        # Without its Python function, which handles the symbols of torch.export.
        self.operation = operation._op if type(operation) is torch._ops.OpOverload else operation
        self.name = schema.name.removeprefix("aten::")
        returned = [output.alias_info for output in schema.returns]
        # For each result: whether it is an argument, changed or viewed.
        self.is_known = [alias is not None for alias in returned]
        overload_name = f".{schema.overload_name}" if schema.overload_name else ""
        self.draw = _DRAWS.get(self.name + overload_name)
        substitute = _SUBSTITUTES.get(self.name + overload_name) or (None if schema.is_mutable else _SUBSTITUTES.get(self.name))
        # Substitutes take the seed from their arguments.
        self.is_random = self.draw is not None or torch.Tag.nondeterministic_seeded in tags and not substitute
        names = [argument.name for argument in schema.arguments]
        # For attention, the index of the probability of dropout. With 0, it draws nothing.
        self.dropout = names.index("dropout_p") if self.draw and "dropout_p" in names else None
        self.is_number = torch.Tag.data_dependent_output in tags or self.name in ("allclose", "is_nonzero", "item")
        self.is_mutable = schema.is_mutable
        self.is_empty = self.name in ("empty", "empty_strided")
        # The results of `linalg_lstsq` depend on the method, which differs on the GPU.
        self.is_shaped_by_values = torch.Tag.dynamic_output_shape in tags and self.name != "linalg_lstsq"
        # Buffers of cuDNN, which here begin with the seed of dropout.
        self.has_buffer = self.name in ("_cudnn_init_dropout_state", "_cudnn_rnn")
        self.compute = functools.partial(self.draw, None) if self.dropout is not None else substitute or self.operation
        self.counts = _COUNTS.get(self.name)
        # The GPU can run it before the CPU, and all results are new or all are arguments.
        is_plain = all(self.is_known) if schema.is_mutable else not any(self.is_known)
        reads_masks = self.counts is _indices
        self.is_plain = is_plain and not (self.is_random or (not reads_masks and (self.counts or self.is_shaped_by_values)))
        is_copied = not (torch.Tag.pointwise in tags or self.name in _WRITTEN_IN_PLACE)
        into = None if schema.is_mutable or is_copied or self.compute is not self.operation else _into(operation)
        self.into = into and (into._op, into._schema.arguments[-1].name)
        # How the library runs it.
        self.without_python = None
        self.lacks_halves = False
        is_simple = self.is_plain and not self.is_empty and self.counts in (None, _indices)
        has_lists = any("List[Tensor" in str(output.type) for output in schema.returns)
        on_cpu = torch.ops.aten.native_batch_norm.default if self.name == "cudnn_batch_norm" else operation
        is_same = self.compute is self.operation or on_cpu is not operation or self.name in _SOFTMAX
        refuses_values = self.name != "linalg_vector_norm" and self.name.startswith(_REFUSE_VALUES)
        if is_simple and is_same and not has_lists and not refuses_values:
            results = 0 if schema.is_mutable else 1 if into else 3 if self.is_number else 2
            pins = names.index("pin_memory") if "pin_memory" in names else len(names)
            is_particular = "layout" in names or self.name in _SOFTMAX
            numbers = len(names), len(schema.returns), results, pins, self.name not in _DIVISIONS, is_particular
            self.without_python = _Description((_named(operation), _named(into or on_cpu)), *numbers)

    def draws(self, args):
        """Returns whether the operation takes random numbers. PyTorch may leave out a probability of 0, because it is the default."""
        return self.is_random and (self.dropout is None or args[self.dropout : self.dropout + 1] > (0,))

    def on_cpu(self, args, kwargs):
        """Computes in single precision what the CPU lacks in half precision, for example the gradient of a layer norm."""
        try:
            if self.name == "add" and any(tensor.layout is not _STRIDED for tensor in _tensors(args)):
                return _add(*args, **kwargs)
            return self.compute(*args, **kwargs)
        except RuntimeError:
            if self.is_mutable or not any(tensor.dtype in _HALVES for tensor in _tensors(args)):
                raise
            self.lacks_halves = True
            return self.compute(*_mapped(_in_single, args), **{name: _mapped(_in_single, value) for name, value in kwargs.items()})


class _Values:
    def __init__(self, library, begin, end):
        self.gpu, self.begin, self.end = library, begin, end
        self.generation, self.captures = (ctypes.c_uint64.in_dll(library, f"harness_values_{name}") for name in ("generation", "captures"))
        self.known_generation = 0
        self.storages = {}  # by the first address
        self.aliases = {}  # by address, offset in the storage, type, size, strides and whether the contents are conjugated or negated
        self.not_computed = collections.Counter()  # operations that the CPU lacks
        self.beyond_limit = 0  # operations for which host memory did not suffice

    def run(self, is_outer, original, kind, args, kwargs):
        """Runs an operation. Small dense tensors take the fast path, all others `run_any`."""
        on_cpu = None
        if _C._len_torch_dispatch_stack() > 0:
            return self.run_any(is_outer, original, kind, args, kwargs)
        if kind.is_empty:  # A kernel that is not computed leaves zeros in its results, not what the memory contained before.
            result = original(*args, **kwargs)
            self.clear((result,))
            return result
        if (kind.is_plain or kind.dropout and not kind.draws(args)) and not (self.captures.value and _C._cuda_isCurrentStreamCapturing()):
            try:
                on_cpu = self.small_on_cpu(args)
            except NotComputed:
                pass
            for value in kwargs.values():
                if type(value) not in _AS_THEY_ARE:
                    on_cpu = None
            if kind.counts and on_cpu and kind.counts(*on_cpu, **kwargs):
                on_cpu = None
        if on_cpu is None:
            return self.run_any(is_outer, original, kind, args, kwargs)
        if on_cpu is args:
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, ValueError) as error:
            if not self.end():
                raise
            return self.despite(error, kind, args, kwargs, _tensors(args), None)
        if self.generation.value == self.known_generation:
            try:
                if kind.is_mutable:
                    kind.compute(*on_cpu, **kwargs)
                    self.accept(is_outer, kind, args)
                    return result
                if kind.is_number:
                    number = kind.compute(*on_cpu, **kwargs)
                    self.accept(is_outer, kind, args)
                    return number
                if type(result) in _PLAIN and result.nbytes < _CHECKED:
                    into = self.alias(result)
                    if kind.into is not None:
                        compute, name = kind.into
                        compute(*on_cpu, **kwargs, **{name: into})
                        self.accept(is_outer, kind, args)
                        return result
                    computed = kind.compute(*on_cpu, **kwargs)
                    if computed.shape == into.shape:
                        into.copy_(computed)
                        self.accept(is_outer, kind, args)
                        return result
                elif type(result) in _LISTS and self.fits(_tensors(result)):
                    computed = kind.compute(*on_cpu, **kwargs)
                    self.accept(is_outer, kind, args)
                    return self.taken_over(kind, result, computed, kind.is_known)
            except IndexError as error:  # A GPU ends the program too.
                original.error = error
                raise
            except (RuntimeError, TypeError, NotComputed):  # TypeError: another version of PyTorch.
                pass
        self.end()
        return self.computed(False, original, kind, args, kwargs, _tensors(args), result, True, None)

    def accept(self, is_outer, kind, args):
        """Reports that the CPU accepts arguments of these types, so that the library runs the operation next time."""
        if is_outer and kind.without_python and (kind.name not in _SOFTMAX or args[-1] in (False, args[0].dtype)):
            self.gpu.harness_values_accepted()

    def small_on_cpu(self, values):
        """The values on the CPU. `values` if no tensor is on the GPU. None if a tensor is not dense or not small."""
        on_cpu, is_any_on_gpu = [], False
        for value in values:
            kind = type(value)
            if kind in _PLAIN:
                if value.is_cuda:
                    is_any_on_gpu = True
                    if _has_parts(value) or value.is_quantized or value.nbytes >= _CHECKED:
                        return None
                    value = self.alias(value)
            elif kind in _LISTS:
                items = self.small_on_cpu(value)
                if items is None:
                    return None
                is_any_on_gpu |= items is not value
                value = items
            elif kind not in _AS_THEY_ARE:
                return None
            on_cpu.append(value)
        return on_cpu if is_any_on_gpu else values

    def run_any(self, is_outer, original, kind, args, kwargs):
        inputs = _tensors(args)
        _add_tensors(kwargs.values(), inputs)
        device = kwargs.get("device")
        on_gpu = device is not None and torch.device(device).type == "cuda"
        is_computed = is_merged = True
        for tensor in inputs:
            if type(tensor) not in _PLAIN:
                if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                    return self.passed_on(is_outer, original, kind, args, kwargs)
                if _C._is_torch_function_enabled():  # The subclass must not see how the values are computed.
                    with _C.DisableTorchFunctionSubclass():
                        return self.run_any(is_outer, original, kind, args, kwargs)
            on_gpu |= tensor.is_cuda
            if _has_parts(tensor) or tensor.is_quantized:
                is_computed &= _parts(tensor) is not None
                is_merged &= tensor.layout != torch.sparse_coo or tensor.is_coalesced()
        if not on_gpu:
            return original(*args, **kwargs)
        if _C._len_torch_dispatch_stack() > 0:
            return self.passed_on(is_outer, original, kind, args, kwargs)
        is_captured = self.captures.value and _C._cuda_isCurrentStreamCapturing()
        is_computed = is_computed and not is_captured
        state = _random_state(kwargs.get("generator"), inputs, device) if is_computed and kind.draws(args) else None
        try:
            numbers = kind.counts or (None if is_merged else _merged)
            counts = numbers(*self.on_cpu(args), **self.on_cpu(kwargs)) if numbers and is_computed else ()
        except Exception:  # The operation itself reports the problem.
            counts = ()
        if counts:
            self.begin((ctypes.c_int64 * len(counts))(*counts), len(counts))
        try:
            result = original(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, ValueError) as error:
            result = error
        finally:
            has_read = self.end()
        if isinstance(result, Exception):
            if not is_computed or not has_read:
                raise result
            return self.despite(result, kind, args, kwargs, inputs, state)
        if is_captured:  # Launches of the graph are counted.
            return result
        return self.computed(is_outer, original, kind, args, kwargs, inputs, result, is_computed, state)

    def passed_on(self, is_outer, original, kind, args, kwargs):
        """Calls the operation of a mode or a subclass. It calls operations on plain tensors, which arrive through the inner key."""
        self.end()
        _include(False, is_outer)
        return original(*args, **kwargs)

    def computed(self, is_outer, original, kind, args, kwargs, inputs, result, is_computed, state):
        """Computes the values of the GPU's results. Returns the results, or numbers in their place."""
        outputs = _tensors((result,))
        if not outputs and not kind.is_mutable and not kind.is_number:
            return result
        # The CPU would replace the parts of a sparse tensor that it changes.
        for output in outputs:
            if _has_parts(output) or output.is_quantized:
                is_computed &= _parts(output) is not None and (output.is_nested or not kind.is_mutable)
        if not is_computed:
            self.not_computed[kind.name] += 1
            return result
        if not self.fits(outputs if not kind.is_mutable else inputs):
            self.beyond_limit += 1
            known = kind.is_known if len(kind.is_known) == len(outputs) else [False] * len(outputs)
            self.clear(tensor for tensor, is_known in zip(outputs, known) if not is_known)
            return result
        try:
            computed = self.compute(kind, args, kwargs, state)
        except IndexError as error:
            original.error = error
            raise
        except Exception:  # The CPU lacks the operation, or does not have it for these types.
            self.not_computed[kind.name] += 1
            return result
        is_plain = not kind.into and not kind.counts and not kind.lacks_halves
        if is_plain and all(tensor.layout is _STRIDED for tensor in (*inputs, *outputs)):
            self.accept(is_outer, kind, args)
        return self.taken_over(kind, result, computed, kind.is_known)

    def despite(self, error, kind, args, kwargs, inputs, state):
        """Handles the error of an operation that read values from the GPU. Returns the CPU's result if the CPU accepts the values."""
        if kind.is_mutable:
            raise error
        try:
            computed = self.compute(kind, args, kwargs, state)
        except Exception:
            raise error from None
        device = next((tensor.device for tensor in inputs if tensor.is_cuda), kwargs.get("device"))

        return _mapped(lambda tensor: self.on_gpu(tensor, device), computed)

    def on_gpu(self, tensor, device):
        if _has_parts(tensor):
            return _like(tensor, [self.on_gpu(part, device) for part in _parts(tensor)])
        created = torch.empty_like(tensor, device=device)
        self.alias(created).copy_(tensor)
        return created

    def compute(self, kind, args, kwargs, state):
        args = self.on_cpu(args)
        if kwargs:
            kwargs = self.on_cpu(kwargs)
            kwargs.pop("pin_memory", None)
        if state is None:
            return kind.on_cpu(args, kwargs)
        if kind.draw is not None:
            kwargs.pop("generator", None)
            return kind.draw(random_numbers.Numbers(*state), *args, **kwargs)
        state = _seed(*state)
        if kwargs.get("generator") is not None:
            kwargs["generator"] = torch.Generator().manual_seed(state)
        with _seeded(state):
            return kind.on_cpu(args, kwargs)

    def clear(self, tensors):
        for tensor in tensors:
            if tensor.is_cuda and tensor.layout is _STRIDED:
                self.gpu.harness_values_clear(tensor.data_ptr(), tensor.nbytes)

    def on_cpu(self, value):
        if isinstance(value, torch.Tensor):
            return self.alias(value) if value.is_cuda else value
        if value is None or type(value) in _NUMBERS:
            return value
        if type(value) in (tuple, list):
            return type(value)(map(self.on_cpu, value))
        if type(value) is dict:
            return {key: self.on_cpu(item) for key, item in value.items()}
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

    def alias(self, tensor):
        """A tensor of the CPU over the contents of a tensor of the GPU."""
        if _has_parts(tensor):
            return _like(tensor, [self.alias(part) for part in _parts(tensor)])
        address = tensor.data_ptr()
        if self.generation.value != self.known_generation:
            self.known_generation = self.generation.value
            self.storages, self.aliases = {}, {}
        key = address, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
        alias = self.aliases.get(key)
        if alias is None:
            if address == 0 or tensor.numel() == 0:
                return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
            if len(self.aliases) >= _MOST_ALIASES:
                self.storages, self.aliases = {}, {}
            alias = self.aliases[key] = self.new_alias(tensor, address, tensor.storage_offset())
        return alias

    def new_alias(self, tensor, address, offset):
        first = address - offset * tensor.element_size()
        storage = self.storages.get(first)
        if storage is None:
            found = (ctypes.c_uint64 * 3)()  # Other threads may run during the call.
            if not self.gpu.harness_values_range(address, found) or first < found[0]:
                raise NotComputed
            start, size, host = found
            size, host = start + size - first, host + first - start
            storage = torch.frombuffer((ctypes.c_uint8 * size).from_address(host), dtype=torch.uint8).untyped_storage()
            self.storages[first] = storage
        alias = torch.empty(0, dtype=tensor.dtype).set_(storage, offset, tensor.size(), tensor.stride())
        alias = alias.conj() if tensor.is_conj() else alias
        return torch._neg_view(alias) if tensor.is_neg() else alias

    def fits(self, written):
        # Not the storages: a storage's object in Python is a reference that prevents autograd from accumulating in place.
        size = 0
        for tensor in written:
            if tensor.is_cuda:
                size += tensor.nbytes if tensor.layout is _STRIDED else sum(part.nbytes for part in _parts(tensor))
        return size < _CHECKED or self.gpu.harness_values_fit(2 * size)

    def taken_over(self, kind, result, computed, is_known):
        """Returns the program's results with the computed contents, or computed numbers."""
        if isinstance(result, (tuple, list)) and len(is_known) == len(result) > 0:
            if isinstance(computed, (tuple, list)) and len(computed) == len(result):
                pairs = zip(result, computed, is_known)
                return type(result)([own if other is None or known else self.taken_over(kind, own, other, [False]) for own, other, known in pairs])
            return result
        if isinstance(result, (tuple, list)) and isinstance(computed, (tuple, list)):  # A list of tensors
            return type(result)(self.taken_over(kind, own, other, is_known) for own, other in zip(result, computed))
        if not isinstance(result, torch.Tensor):
            return computed if isinstance(computed, (bool, int, float, complex)) else result
        if is_known[:1] == [True] or not isinstance(computed, torch.Tensor):
            return result
        if _has_parts(computed):
            if not result.is_cuda:
                return computed
            own, parts = _parts(result), _parts(computed)
            if own is None or [part.shape for part in own] != [part.shape for part in parts]:
                return self.on_gpu(computed, result.device)
            for into, part in zip(own, parts):
                self.alias(into).copy_(part)
            return result
        is_other = result.shape != computed.shape and computed.dim() > 0  # A number fills its result, for example the seeds of dropout.
        if is_other and kind.is_shaped_by_values:
            result = torch.empty(computed.shape, dtype=result.dtype, device=result.device)
        elif is_other and not kind.has_buffer:
            if result.numel() != computed.numel():
                return result
            computed = computed.reshape(result.shape)  # From PyTorch 2.9 on, a result of cuDNN's attention has one dimension more.
        into = self.alias(result) if result.is_cuda else result
        if is_other and kind.has_buffer:
            into = into[: len(computed)]
        if into.data_ptr() != computed.data_ptr():
            into.copy_(computed)
        return result


def _is_without_values(schema):
    """Returns whether an operation only views tensors, or does nothing with values."""
    returned = [output.alias_info for output in schema.returns]
    views = bool(returned) and all(alias is not None and not alias.is_write for alias in returned)
    name = schema.name.removeprefix("aten::")
    return views or name in _WITHOUT_VALUES or f"{name}.{schema.overload_name}" in _WITHOUT_VALUES


def _into(operation):
    """The overload of an operation that writes its result into a tensor, with the tensor's name."""
    named = lambda arguments: [(argument.name, str(argument.type)) for argument in arguments]
    wanted = named(operation._schema.arguments)
    for name in operation._overloadpacket.overloads():
        overload = getattr(operation._overloadpacket, name)
        *arguments, last = overload._schema.arguments or [None]
        if last is not None and last.is_out and str(last.type) == "Tensor" and named(arguments) == wanted:
            return overload
    return None


_Name = ctypes.c_char_p * 2


class _Description(ctypes.Structure):
    """`Description` in torch_kernel.rs"""

    _fields_ = [
        ("names", _Name * 2),
        *((name, ctypes.c_size_t) for name in ("arguments", "returns", "results", "pins")),
        *((name, ctypes.c_bool) for name in ("takes_integers", "is_particular")),
    ]


def _named(operation):
    return _Name(operation._schema.name.encode(), operation._schema.overload_name.encode())


def _tensors(values):
    found = []
    _add_tensors(values, found)
    return found


def _add_tensors(values, found):
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) in (tuple, list):
            _add_tensors(value, found)


def _in_single(tensor):
    return tensor.float() if tensor.dtype in _HALVES else tensor


def _mapped(function, value):
    if isinstance(value, torch.Tensor):
        return function(value)
    return type(value)(_mapped(function, item) for item in value) if isinstance(value, (tuple, list)) else value


def _parts(tensor):
    """The tensors that hold the contents of a tensor, or None if the CPU cannot use them."""
    if tensor.is_nested:
        return [tensor.values()]
    if tensor.layout == torch.strided:
        return None if tensor.is_quantized else [tensor]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return None


def _has_parts(tensor):
    return tensor.layout is not _STRIDED or tensor.is_nested


def _like(tensor, parts):
    """A nested or sparse tensor of these parts."""
    if tensor.is_nested:
        (values,) = parts
        if not values.is_cuda:  # All of a nested tensor's storage must be its values.
            values = torch.frombuffer((ctypes.c_uint8 * values.nbytes).from_address(values.data_ptr()), dtype=values.dtype)
        return torch._nested_view_from_buffer(values, tensor._nested_tensor_size(), tensor._nested_tensor_strides(), tensor._nested_tensor_storage_offsets())
    if tensor.layout == torch.sparse_coo:
        dimensions, options = (tensor.sparse_dim(), tensor.dense_dim()), dict(dtype=parts[1].dtype, device=parts[1].device, layout=tensor.layout)
        # Unlike `sparse_coo_tensor`, it does not warn that it checks nothing.
        return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(*dimensions, tensor.size(), *parts, **options, is_coalesced=tensor.is_coalesced())
    return torch.sparse_compressed_tensor(*parts, tensor.size(), layout=tensor.layout, check_invariants=False)


def _random_state(generator, inputs, device):
    """Seed and offset of the GPU's generator."""
    if generator is None:
        device = next((tensor.device for tensor in inputs if tensor.is_cuda), device)
        generator = torch.cuda.default_generators[torch.device(device).index or 0]
    state = bytes(generator.get_state().tolist())
    return int.from_bytes(state[:8], "little"), int.from_bytes(state[8:16], "little")


def _seed(seed, offset):
    """A seed of the CPU's generator, so a repeated operation with a restored state gives the same numbers."""
    return (seed * 0x9E3779B97F4A7C15 + offset + 1) & _SEED_MASK


@contextlib.contextmanager
def _seeded(seed):
    """Seeds the CPU's generator, and restores its state at the end, because the program's own random numbers on the CPU must not change."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


# The numbers that operations read from the GPU to choose the size of their results.


def _elements(tensor, *_, **__):
    return [int(torch.count_nonzero(tensor))]


def _indices(tensor, indices, *_, **__):
    return [int(torch.count_nonzero(index)) for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]


def _masked(tensor, mask, *_, **__):
    return [int(torch.count_nonzero(torch.broadcast_tensors(tensor, mask)[1]))]


def _distinct(tensor, *_, **__):
    # The kernel for flags reads how many are true.
    return [int(tensor.sum()) if tensor.dtype is torch.bool else len(torch.unique(tensor))]


def _distinct_of_both(*tensors, **_):
    return [number for tensor in tensors if isinstance(tensor, torch.Tensor) for number in _distinct(tensor)]


def _runs(tensor, return_inverse=False, return_counts=False, dim=None):
    return [torch.unique_consecutive(tensor, dim=dim).shape[dim or 0]]


def _norm(tensor):
    # The bits of the number. A batch of matrices reads others.
    return [int(torch.linalg.matrix_norm(tensor, 1).view(torch.int32))] if tensor.dim() == 2 and tensor.dtype == torch.float32 else []


def _kept(*args):
    return [len(torch.ops.torchvision.nms(*args))]


def _repeats(repeats, *_, **__):
    return [int(repeats.sum())]


def _bounds(tensor, *_, **__):
    return [int(bound) for bound in torch.aminmax(tensor)]


def _distinct_slices(tensor, dim, *_, **__):
    return [torch.unique(tensor, dim=dim).shape[dim]]


def _modes(tensor, dim=-1, *_, **__):
    # For each slice: steps between values, values, largest count with its index, mode, whether and where it was found, index.
    values = tensor.transpose(dim, -1).sort().values
    steps = (values[..., 1:] != values[..., :-1]).sum(-1).flatten().tolist()
    return [number for step in steps for number in (step, step + 1, 0, 0, 0, 1, 0, 0)]


def _deviations(mean, deviation=1.0, *_, **__):
    # `normal` checks twice that no deviation is negative.
    return 2 * [int(deviation.min() >= 0)] if isinstance(deviation, torch.Tensor) and deviation.numel() else []


def _sparse_elements(name):
    return lambda *args, **kwargs: 2 * [getattr(torch.ops.aten, name)(*args, **kwargs)._nnz()]


def _merged(*args, **_):
    """The elements of each sparse tensor without its duplicates."""
    sparse = [tensor for tensor in args if isinstance(tensor, torch.Tensor) and tensor.layout == torch.sparse_coo]
    return [tensor.coalesce()._nnz() for tensor in sparse if not tensor.is_coalesced()]


def _pools(tensor, dim, *_, **__):
    indices = tensor._indices()
    return [torch.unique(torch.cat([indices[:dim], indices[dim + 1 :]]), dim=1).shape[1]]


_COUNTS = {
    "nonzero": _elements,
    "index": _indices,
    "_unsafe_index": _indices,
    "index_put": _indices,
    "index_put_": _indices,
    "_index_put_impl_": _indices,
    "masked_select": _masked,
    "masked_scatter_backward": _masked,
    "_unique": _distinct,
    "_unique2": _distinct,
    "unique_consecutive": _runs,
    "repeat_interleave": _repeats,
    "bincount": _bounds,
    "mode": _modes,
    "unique_dim": _distinct_slices,
    "unique_dim_consecutive": _distinct_slices,
    "linalg_matrix_exp": _norm,
    "normal": _deviations,
    "isin": _distinct_of_both,
    "_sparse_softmax": _pools,
    "torchvision::nms": _kept,
    **{name: _sparse_elements(name) for name in ("_sparse_sum", *(f"_to_sparse{layout}" for layout in ("", "_csr", "_csc", "_bsr", "_bsc")))},
}


# Operations that exist only on the GPU, in terms of others.


def _gradients(function, inputs, outputs_gradients):
    """The gradients of a function of the CPU, with autograd."""
    with _C._ForceDispatchKeyGuard(*_DEFAULT_KEYS), torch.enable_grad():
        inputs = [None if tensor is None else tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        pairs = [(output, gradient) for output, gradient in zip(outputs, outputs_gradients) if gradient is not None]
        wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
        found = iter(torch.autograd.grad([output for output, _ in pairs], wanted, [gradient for _, gradient in pairs], allow_unused=True))
        return [next(found) if tensor is not None and tensor.requires_grad else None for tensor in inputs]


def _attention(query, key, value, bias, is_causal, scale, dropout, kept):
    """Returns the output and the logarithms of the sums of each row. `kept` returns which weights dropout keeps."""
    if _is_fused(query, value, bias, dropout):
        key, value = _repeated(query, key, value)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale)
    scores, is_masked, *_, value = _scores(query, key, value, bias, is_causal, scale)
    weights, factors = _weighed(scores, is_masked, dropout, kept)
    sums = torch.logsumexp(scores, -1)
    return ((weights if factors is None else weights * factors) @ value).to(query.dtype), sums


def _is_fused(query, value, bias, dropout):
    """Returns whether the CPU's fused operation computes an attention: without dropout, and without rows that the bias masks entirely."""
    return dropout == 0 and query.shape[-1] == value.shape[-1] and (bias is None or not bias.amax(-1).isneginf().any())


def _repeated(query, *tensors):
    """The keys and values for each head of the queries."""
    groups = query.shape[1] // tensors[0].shape[1]
    return tensors if groups == 1 else [tensor.repeat_interleave(groups, 1) for tensor in tensors]


def _scores(query, key, value, bias, is_causal, scale):
    """Returns the scores, which of their rows are masked, the scale, and the operands in single precision with equal numbers of heads."""
    query, key, value = query.float(), *_repeated(query, key.float(), value.float())
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not(), float("-inf"))
    if bias is None:
        return scores, None, scale, query, key, value
    scores = scores + bias
    return scores, torch.logsumexp(scores, -1, True).isneginf(), scale, query, key, value


def _weighed(scores, is_masked, dropout, kept):
    """Returns the weights of the scores, and the factors that dropout applies to them."""
    weights = torch.softmax(scores, -1) if is_masked is None else torch.softmax(scores.masked_fill(is_masked, 0), -1).masked_fill(is_masked, 0)
    return weights, kept(weights, dropout) / (1 - dropout) if dropout > 0 else None


def _attention_forward(count, seed_at, draw, query, key, value, bias, dropout, is_causal, scale, is_flash=False):
    """The `count` results of an operation. Those at `seed_at` carry the generator's state to the backward pass."""
    results = [None] * count
    results[:2] = _attention(query, key, value, bias, is_causal, scale, dropout, draw and draw.kept_by(is_flash))
    if draw:
        results[seed_at : seed_at + 2] = draw.state()
    return results


def _attention_backward(gradient, query, key, value, bias, output, sums, dropout, is_causal, seed, offset, scale, is_flash=False, is_bias_wanted=False):
    heads = lambda found, like: found if found.shape == like.shape else found.unflatten(1, (like.shape[1], -1)).sum(2)
    if not is_bias_wanted and _is_fused(query, value, bias, dropout):
        sums = sums.reshape(*query.shape[:2], -1)[..., : query.shape[2]]
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        operands = query, *_repeated(query, key, value), output, sums
        of_query, of_key, of_value = run(gradient, *operands, 0.0, is_causal, attn_mask=bias, scale=scale)
        return of_query, heads(of_key, key), heads(of_value, value), None
    kept = random_numbers.Numbers.of(seed, offset).kept_by(is_flash) if dropout > 0 else None
    scores, is_masked, scale, *operands = _scores(query, key, value, bias, is_causal, scale)
    weights, factors = _weighed(scores, is_masked, dropout, kept)
    gradient = gradient.float()
    of_weights = gradient @ operands[2].transpose(-2, -1)
    of_value = (weights if factors is None else weights * factors).transpose(-2, -1) @ gradient
    of_scores = torch.ops.aten._softmax_backward_data(of_weights if factors is None else of_weights * factors, weights, -1, torch.float32)
    of_products = of_scores * scale
    of_key, of_value = (found.to(query.dtype) for found in (heads(of_products.transpose(-2, -1) @ operands[0], key), heads(of_value, value)))
    of_bias = of_scores.sum_to_size(bias.shape).to(bias.dtype) if is_bias_wanted else None
    return (of_products @ operands[1]).to(query.dtype), of_key, of_value, of_bias


def _flash(draw, query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=None):
    return _attention_forward(9, 6, draw, query, key, value, None, dropout_p, is_causal, scale, True)


def _flash_backward(grad_out, query, key, value, out, logsumexp, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, scale=None):
    return _attention_backward(grad_out, query, key, value, None, out, logsumexp, dropout_p, is_causal, seed, offset, scale, True)[:3]


def _sequences(tensor, ends):
    """Splits a tensor in the layout of FlashAttention into its sequences, in the layout of `_attention`."""
    parts = tensor.split(1) if ends is None else [part.unsqueeze(0) for part in tensor.split(ends.diff().tolist())]
    return [part.transpose(1, 2) for part in parts]


def _flash_library(query, key, value, ends_q, ends_k, dropout, is_causal, scale, draw, windows, others):
    """Returns the output and, for sequences of equal length, the logarithms of the sums. Sliding windows and `others` are not computed."""
    pairs = list(zip(_sequences(query, ends_q), _sequences(key, ends_k), _sequences(value, ends_k)))
    is_windowed = any(window is not None and window >= 0 for window in windows)
    if is_windowed or any(other is not None for other in others) or is_causal and any(q.shape[2] != k.shape[2] for q, k, _ in pairs):
        raise NotComputed
    kept = [draw and draw.after_heads(index * q.shape[1]).kept_by(True) for index, (q, _, _) in enumerate(pairs)]
    results = [_attention(*pair, None, is_causal, scale, dropout, kept) for pair, kept in zip(pairs, kept)]
    output = torch.cat([output.transpose(1, 2) for output, _ in results], 0 if ends_q is None else 1)
    return (output, torch.cat([sums for _, sums in results])) if ends_q is None else (output.squeeze(0), None)


def _flash_forward(
    draw, query, key, value, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale=None, window_size_left=None, window_size_right=None, **others
):
    windows = window_size_left, window_size_right
    results = _flash_library(query, key, value, cum_q, cum_k, dropout_p, is_causal, scale, draw, windows, others.values())
    return *results, *(draw.state() if draw else (None, None)), None


def _flash_library_backward(
    grad_out, query, key, value, out, logsumexp, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, scale=None, window_size_left=None,
    window_size_right=None,
):
    draw = random_numbers.Numbers.of(seed, offset) if dropout_p > 0 else None
    windows = window_size_left, window_size_right
    run = lambda query, key, value: _flash_library(query, key, value, cum_q, cum_k, dropout_p, is_causal, scale, draw, windows, ())[0]
    return [found.to(tensor.dtype) for found, tensor in zip(_gradients(run, [query, key, value], [grad_out]), (query, key, value))]


def _efficient(draw, query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, scale=None):
    output, sums, *state = _attention_forward(4, 2, draw, query, key, value, attn_bias, dropout_p, is_causal, scale)
    if not compute_log_sumexp:
        sums = sums[..., :0]
    padding = -sums.shape[-1] % 32
    return output, torch.nn.functional.pad(sums, (0, padding)) if padding else sums, *state


def _efficient_backward(grad_out, query, key, value, attn_bias, out, logsumexp, seed, offset, dropout_p, grad_input_mask, is_causal=False, scale=None):
    others = dropout_p, is_causal, seed, offset, scale, False, attn_bias is not None and grad_input_mask[3]
    return _attention_backward(grad_out, query, key, value, attn_bias, out, logsumexp, *others)


def _efficient_library(query, key, value, bias, ends_q, ends_k, dropout, mask, scale, others):
    """The attention of nested tensors, without a bias or dropout. `mask` is 0, or a kind of causal mask."""
    if dropout > 0:
        raise NotComputed
    tensors = query, key, value
    if ends_q is not None:
        tensors = [tensor.squeeze(0) for tensor in tensors]
    output = _flash_library(*tensors, ends_q, ends_k, 0.0, mask > 0, scale, None, (), (bias, *others))[0]
    return output if ends_q is None else output.unsqueeze(0)


def _efficient_forward(
    draw, query, key, value, bias, ends_q, ends_k, max_q, max_k, dropout_p, custom_mask_type, compute_log_sumexp=False, scale=None, seqlen_k=None, window_size=None
):
    return _efficient_library(query, key, value, bias, ends_q, ends_k, dropout_p, custom_mask_type, scale, (seqlen_k, window_size)), *[None] * 5


def _efficient_library_backward(
    grad_out, query, key, value, bias, out, ends_q, ends_k, max_q, max_k, logsumexp, dropout_p, seed, offset, custom_mask_type, bias_requires_grad, scale=None,
    num_splits_key=None, window_size=None, shared_storage_dqdkdv=False
):
    run = lambda query, key, value: _efficient_library(query, key, value, bias, ends_q, ends_k, dropout_p, custom_mask_type, scale, (window_size,))
    return *_gradients(run, [query, key, value], [grad_out]), None


def _cudnn(draw, query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=None):
    return _attention_forward(9, 6, draw, query, key, value, attn_bias, dropout_p, is_causal, scale)


def _cudnn_backward(
    grad_out, query, key, value, out, logsumexp, seed, offset, attn_bias, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, scale=None
):
    return _attention_backward(grad_out, query, key, value, attn_bias, out, logsumexp, dropout_p, is_causal, seed, offset, scale)[:3]


def _product_of(function):
    """Returns the product with the type of the result as its last positional argument."""
    return lambda *inputs, **options: function(*(tensor.to(inputs[-1]) for tensor in inputs[:-1]), **options)


def _batch_norm(input, weight, bias, running_mean, running_var, training, exponential_average_factor, epsilon):
    results = torch.native_batch_norm(input, weight, bias, running_mean, running_var, training, exponential_average_factor, epsilon)
    return *results, None


def _batch_norm_backward(input, grad_output, weight, running_mean, running_var, save_mean, save_var, epsilon, reserveSpace):
    arguments = (grad_output, input, weight, running_mean, running_var, save_mean, save_var, True, epsilon, [True, True, True])
    return torch.ops.aten.native_batch_norm_backward(*arguments)


# The operations of SyncBatchNorm. The second dimension has the channels.


def _batch_norm_stats(input, eps):
    variance, mean = torch.var_mean(_in_single(input), _but_channels(input), correction=0)
    return mean, (variance + eps).rsqrt()


def _but_channels(input):
    return [dimension for dimension in range(input.dim()) if dimension != 1]


def _per_channel(input, *numbers):
    """Reshapes numbers of each channel so that they broadcast to the shape of `input`. None stays None."""
    shape = [-1 if dimension == 1 else 1 for dimension in range(input.dim())]
    return [None if number is None else _in_single(number).view(shape) for number in numbers]


def _batch_norm_elemt(input, weight, bias, mean, invstd, eps):
    weight, bias, mean, invstd = _per_channel(input, weight, bias, mean, invstd)
    output = (_in_single(input) - mean) * invstd
    output = output if weight is None else output * weight
    return (output if bias is None else output + bias).to(input.dtype)


def _batch_norm_gather_stats(input, mean, invstd, running_mean, running_var, momentum, eps, counts):
    """Combines the statistics of the processes, which have a row each."""
    counts = counts.view(-1, 1) if isinstance(counts, torch.Tensor) else torch.full((len(mean), 1), float(counts))
    total = counts.sum()
    joined = (mean * counts).sum(0) / total
    squares = (((invstd.pow(-2) - eps) + (mean - joined).square()) * counts).sum(0)
    if running_mean is not None:
        running_mean.lerp_(joined.to(running_mean.dtype), momentum)
        running_var.lerp_((squares / (total - 1)).to(running_var.dtype), momentum)
    return joined, (squares / total + eps).rsqrt()


def _batch_norm_backward_reduce(grad_out, input, mean, invstd, weight, input_g, weight_g, bias_g):
    gradient, (center,) = _in_single(grad_out), _per_channel(input, mean)
    of_sums = gradient.sum(_but_channels(input))
    of_products = (gradient * (_in_single(input) - center)).sum(_but_channels(input))
    return of_sums, of_products, of_products * invstd, of_sums


def _batch_norm_backward_elemt(grad_out, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    total = count.sum()
    mean, invstd, weight, of_sums, of_products = _per_channel(input, mean, invstd, weight, sum_dy / total, sum_dy_xmu / total)
    gradient = (_in_single(grad_out) - of_sums - (_in_single(input) - mean) * of_products * invstd.square()) * invstd
    return (gradient if weight is None else gradient * weight).to(input.dtype)


def _cudnn_ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, deterministic, zero_infinity):
    loss, log_alpha = torch.ops.aten._ctc_loss(log_probs, targets, input_lengths, target_lengths, blank)
    arguments = log_probs, targets, input_lengths, target_lengths, loss, log_alpha, blank
    return loss, torch.ops.aten._ctc_loss_backward(torch.ones_like(loss), *arguments)


def _grid_sampler(input, grid):
    return torch.ops.aten.grid_sampler_2d(input, grid, 0, 0, True)


def _grid_sampler_backward(input, grid, grad_output):
    return torch.ops.aten.grid_sampler_2d_backward(grad_output, input, grid, 0, 0, True, [True, True])


def _log_sigmoid_backward(grad_output, input, buffer):
    # Only the CPU's forward pass fills the buffer.
    return torch.ops.aten.log_sigmoid_backward(grad_output, input, torch.exp(-input.abs()))


def _add(input, other, *, alpha=1):
    """The sum of tensors, of which at least one is sparse."""
    if input.layout == other.layout == torch.sparse_csc:
        return torch.add(input.t(), other.t(), alpha=alpha).t()  # The CPU adds only matrices in CSR.
    if input.layout != torch.sparse_coo or other.layout != torch.sparse_coo:
        return torch.add(input, other, alpha=alpha)
    # The GPU appends, and the CPU merges.
    indices, values = torch.cat([input._indices(), other._indices()], 1), torch.cat([input._values(), alpha * other._values()])
    return torch.sparse_coo_tensor(indices, values, input.size(), is_coalesced=False, check_invariants=False)


def _unique_dim(tensor, dim, sorted=True, return_inverse=False, return_counts=False):
    values, inverse, counts = torch.ops.aten.unique_dim(tensor, dim, sorted, return_inverse, return_counts)
    # The GPU returns only what is asked for.
    return values, inverse if return_inverse else inverse[:0], counts if return_counts else counts[:0]


def _embedding_bag_of(function):
    """The CPU leaves out what its own backward pass does not need."""

    def run(weight, indices, offsets, scale_grad_by_freq=False, mode=0, sparse=False, per_sample_weights=None, include_last_offset=False, padding_idx=-1):
        arguments = (scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx)
        output, *_, largest = function(weight, indices, offsets, *arguments)
        starts = offsets[:-1] if include_last_offset else offsets
        bags = torch.searchsorted(starts, torch.arange(len(indices), dtype=starts.dtype), right=True) - 1
        return output, bags, torch.bincount(bags[indices != padding_idx], minlength=len(starts)), largest

    return run


def _histc(input, *args, **kwargs):
    return torch.histc(input if input.is_floating_point() else input.double(), *args, **kwargs).to(input.dtype)


def _softmax_of(function):
    """A softmax of the CPU, which computes halves in single precision if it returns that."""
    return lambda input, dim, half_to_float: function(input.float() if half_to_float else input, dim, False)


def _softmax_backward_of(function):
    return lambda grad_output, output, dim, input_dtype: function(grad_output, output, dim, grad_output.dtype).to(input_dtype)


def _recurrent(input, weights, hx, cx, mode, layers, batch_first, dropout, train, bidirectional, batch_sizes):
    function = (torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru)[mode]
    hidden = (hx, cx) if mode == 2 else hx
    per_layer = len(weights) // (layers * (2 if bidirectional else 1))
    # Autocast passes matrices as vectors.
    outputs, rows = hx.size(-1), (1, 1, 4, 3)[mode] * (cx if mode == 2 else hx).size(-1)
    shapes = ((rows, -1), (rows, -1), (rows,), (rows,), (outputs, -1)) if per_layer > 3 else ((rows, -1), (rows, -1), (outputs, -1))
    weights = [weight.reshape(shapes[index % per_layer]) for index, weight in enumerate(weights)]
    if batch_sizes:
        output, *last = function(input, torch.tensor(batch_sizes), hidden, weights, per_layer > 3, layers, dropout, train, bidirectional)
    else:
        output, *last = function(input, hidden, weights, per_layer > 3, layers, dropout, train, bidirectional, batch_first)
    return output, *last


def _cudnn_init_dropout_state(dropout, train, dropout_seed, **_):
    return _bytes(dropout_seed)


def _bytes(number):
    return torch.tensor([number]).view(torch.uint8)


def _cudnn_rnn(
    input, weight, weight_stride0, weight_buf, hx, cx, mode, hidden_size, proj_size, num_layers, batch_first, dropout, train, bidirectional, batch_sizes, dropout_state
):
    others, reserve = (mode, num_layers, batch_first, dropout, train, bidirectional, batch_sizes), None
    if train and dropout > 0:
        state = dropout_state.view(torch.int64)
        reserve = _bytes(state[0].item())
        state[0] = _seed(state[0].item(), 0)
    with _same_dropout(reserve):
        output, *last = _recurrent(input, weight, hx, cx, *others)
    return output, last[0], last[1] if mode == 2 else None, reserve, None


def _same_dropout(reserve):
    """Seeds the dropout between layers of both passes from the start of the reserve. None for no dropout."""
    return contextlib.nullcontext() if reserve is None else _seeded(reserve[:8].view(torch.int64).item() & _SEED_MASK)


def _cudnn_rnn_backward(
    input, weight, weight_stride0, weight_buf, hx, cx, output, grad_output, grad_hy, grad_cy, mode, hidden_size, proj_size, num_layers, batch_first, dropout, train,
    bidirectional, batch_sizes, dropout_state, reserve, output_mask
):
    others = mode, num_layers, batch_first, dropout, train, bidirectional, batch_sizes
    run = lambda input, hx, cx, *weights: _recurrent(input, list(weights), hx, cx, *others)
    with _same_dropout(reserve if train and dropout > 0 else None):
        input_gradient, hx_gradient, cx_gradient, *weights = _gradients(run, [input, hx, cx, *weight], [grad_output, grad_hy, grad_cy])
    return input_gradient, hx_gradient, cx_gradient, weights


def _lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    sums = (input_gates if input_bias is None else input_gates + input_bias) + (hidden_gates if hidden_bias is None else hidden_gates + hidden_bias)
    entry, forget, cell, output = sums.chunk(4, 1)
    entry, forget, cell, output = entry.sigmoid(), forget.sigmoid(), cell.tanh(), output.sigmoid()
    cy = forget * cx + entry * cell
    return output * cy.tanh(), cy, torch.cat([entry, forget, cell, output], 1)


def _lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    entry, forget, cell, output = workspace.chunk(4, 1)
    tanh = cy.tanh()
    gradient = torch.zeros_like(cy) if grad_hy is None else grad_hy
    of_cell = gradient * output * (1 - tanh * tanh)
    if grad_cy is not None:
        of_cell = of_cell + grad_cy
    of_gates = (
        of_cell * cell * (1 - entry) * entry,
        of_cell * cx * (1 - forget) * forget,
        of_cell * entry * (1 - cell * cell),
        gradient * tanh * (1 - output) * output,
    )
    gates = torch.cat(of_gates, 1)
    return gates, of_cell * forget, gates.sum(0) if has_bias else None


def _gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    if input_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    (of_reset, of_update, of_new), (reset, update, new) = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    of_reset, of_update = (of_reset + reset).sigmoid(), (of_update + update).sigmoid()
    of_new = (of_new + of_reset * new).tanh()
    return of_new + of_update * (hx - of_new), torch.cat([of_reset, of_update, of_new, hx, new], 1)


def _gru_cell_backward(grad_hy, workspace, has_bias):
    reset, update, new, hx, hidden = workspace.chunk(5, 1)
    of_new = grad_hy * (1 - update) * (1 - new * new)
    shared = of_new * hidden * (1 - reset) * reset, grad_hy * (hx - new) * (1 - update) * update
    of_input, of_hidden = torch.cat([*shared, of_new], 1), torch.cat([*shared, of_new * reset], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad_hy * update, *biases


def _rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask):
    dimensions = tuple(range(-len(normalized_shape), 0))
    normalized, gradient = input.float() * rstd, grad_out.float()
    scaled = gradient if weight is None else gradient * weight.float()
    input_gradient = (scaled - normalized * (scaled * normalized).mean(dimensions, keepdim=True)) * rstd
    weight_gradient = (gradient * normalized).reshape(-1, *normalized_shape).sum(0)
    return input_gradient.to(input.dtype), None if weight is None else weight_gradient.to(weight.dtype)


_SUBSTITUTES = {
    "_fused_rms_norm_backward": _rms_norm_backward,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_flash_attention_backward": _flash_library_backward,
    "_efficient_attention_backward": _efficient_library_backward,
    **{f"{name}.{overload}": _product_of(getattr(torch, name)) for name in ("mm", "bmm", "addmm", "baddbmm") for overload in ("dtype", "dtype_out")},
    "cudnn_batch_norm": _batch_norm,
    "cudnn_batch_norm_backward": _batch_norm_backward,
    "batch_norm_stats": _batch_norm_stats,
    "batch_norm_elemt": _batch_norm_elemt,
    "batch_norm_gather_stats": _batch_norm_gather_stats,
    "batch_norm_gather_stats_with_counts": _batch_norm_gather_stats,
    "batch_norm_backward_reduce": _batch_norm_backward_reduce,
    "batch_norm_backward_elemt": _batch_norm_backward_elemt,
    "_cudnn_ctc_loss": _cudnn_ctc_loss,
    "cudnn_grid_sampler": _grid_sampler,
    "cudnn_grid_sampler_backward": _grid_sampler_backward,
    "log_sigmoid_backward": _log_sigmoid_backward,
    "histc": _histc,
    "_embedding_bag": _embedding_bag_of(torch.ops.aten._embedding_bag.default),
    "_embedding_bag_forward_only": _embedding_bag_of(torch.ops.aten._embedding_bag_forward_only.default),
    "unique_dim": _unique_dim,
    "_softmax": _softmax_of(torch.ops.aten._softmax.default),
    "_log_softmax": _softmax_of(torch.ops.aten._log_softmax.default),
    "_softmax_backward_data": _softmax_backward_of(torch.ops.aten._softmax_backward_data.default),
    "_log_softmax_backward_data": _softmax_backward_of(torch.ops.aten._log_softmax_backward_data.default),
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "_cudnn_init_dropout_state": _cudnn_init_dropout_state,
    "_cudnn_rnn": _cudnn_rnn,
    "_cudnn_rnn_backward": _cudnn_rnn_backward,
}
# Operations that draw a GPU's random numbers. The others draw from the CPU's generator, with a seed from the state of the GPU's.
_DRAWS = random_numbers.OPERATIONS | {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_flash_attention_forward": _flash_forward,
    "_efficient_attention_forward": _efficient_forward,
}


def begin(path):
    """Computes the operations of this process with the library at `path`. Returns a function that counts what was not computed."""
    library = ctypes.CDLL(path)
    # These never wait, so they keep the interpreter's lock, which is faster.
    enter, leave, begin, end = (getattr(ctypes.PyDLL(path), f"harness_values_{name}") for name in ("enter", "leave", "begin", "end"))
    begin.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    c10 = ctypes.CDLL("libc10.so")
    library.harness_values_keys(*(ctypes.cast(getattr(c10, name), ctypes.c_void_p) for name in _KEY_FUNCTIONS), int(_KEY), int(_INNER_KEY))
    library.harness_values_range.argtypes = [ctypes.c_uint64, ctypes.c_void_p]
    library.harness_values_clear.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    library.harness_values_fit.argtypes = [ctypes.c_uint64]
    random_numbers.begin(library)
    library.harness_values_range.restype = library.harness_values_fit.restype = ctypes.c_bool
    library.harness_values_probe.restype = library.harness_values_compute.restype = ctypes.c_bool
    library.harness_values_not_computed.restype = library.harness_values_beyond_limit.restype = ctypes.c_uint64
    values, operations = _Values(library, begin, end), torch.ops

    def without_values(benchmark, *args, **kwargs):
        """Calls the benchmark without computed values: only times matter."""
        if not _C._dispatch_tls_is_dispatch_key_included(_INNER_KEY):  # A nested benchmark.
            return benchmark(*args, **kwargs)
        is_outer = enter()
        try:
            return benchmark(*args, **kwargs)
        finally:
            leave(is_outer)

    torch._harness_without_values = lambda benchmark: guard.around(benchmark, without_values)

    def kernel(namespace, name, overload):
        kind = None
        find = lambda: getattr(getattr(getattr(operations, namespace), name), overload or "default")

        def without_values(*args, **kwargs):
            is_outer = enter()
            try:
                return find()(*args, **kwargs)
            finally:
                leave(is_outer)

        def run(original, *args, **kwargs):
            nonlocal kind
            is_outer = enter()
            try:
                if kind is None:
                    kind = _Kind(find())
                    if kind.without_python and not library.harness_values_compute(ctypes.byref(kind.without_python)):
                        kind.without_python = None
                original.function = kind.operation
                return values.run(is_outer, original, kind, args, kwargs)
            except torch.OutOfMemoryError as error:
                if error is not original.error:  # Of a result whose size depends on values.
                    original.error = error
                raise
            finally:
                leave(is_outer)

        return without_values, run

    def register(namespaces):
        """Registers the operations of some namespaces."""
        found = {namespace: [torch_library.Library(namespace, "IMPL", key) for key in _KEYS] for namespace in namespaces}
        _registrations.extend(found.values())
        for schema in _C._jit_get_all_schemas():
            namespace, _, name = schema.name.partition("::")
            full_name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
            if namespace in found and not _is_without_values(schema) and _C._dispatch_has_kernel(full_name):
                for registration in found[namespace]:
                    registration.impl(full_name, guard.around(*kernel(namespace, name, schema.overload_name)))

    others = [torch_library.Library("_", "IMPL", key) for key in _KEYS]
    for registration in others:
        registration.m.fallback_fallthrough()
    _registrations.append(others)
    register(["aten"])

    def load_and_register(load, *args, **kwargs):
        known = {schema.name.partition("::")[0] for schema in _C._jit_get_all_schemas()}
        load(*args, **kwargs)
        register({schema.name.partition("::")[0] for schema in _C._jit_get_all_schemas()} - known)

    guard.wrap(torch.ops, "load_library", load_and_register)
    _include(True, True)
    try:
        _registrations.append(torch_kernel.prepare(library, _KEYS))
    except AttributeError:
        pass  # This build of PyTorch lacks a function, so Python runs all operations.

    # Operations of higher order call their functions with the key.
    def create_without_key(create, operator, *args, **kwargs):
        create(operator, *args, **kwargs)
        operator.fallthrough(_KEY)
        operator.fallthrough(_INNER_KEY)

    guard.wrap(torch._ops.HigherOrderOperator, "__init__", create_without_key)
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(_KEY)
        operator.fallthrough(_INNER_KEY)
    # Threads begin without the key. The backward pass gives its threads the keys of the thread that calls it.
    guard.wrap(threading.Thread, "_bootstrap_inner", _with_values)
    rpc = sys.modules.get("torch.distributed.rpc.internal")
    if rpc is not None:  # Its threads are not Python's.
        guard.wrap(rpc, "_run_function", _with_values)
    return lambda: {
        "kernels": library.harness_values_not_computed(),
        "operations": dict(values.not_computed),
        "beyond_limit": values.beyond_limit + library.harness_values_beyond_limit(),
    }
