"""Compares PyTorch's operators on a simulated GPU with the CPU, by the samples of torch's own tests (`op_db`), with gradients.

    harness exec --values cpu -- python ci/operators.py float32

Needs the packages expecttest and numpy. Prints each operator that differs, then the numbers.
"""
import collections
import sys
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

# Their results are random or uninitialized. `tensor_split` takes an argument on the CPU.
UNKNOWN = set("""
bernoulli cauchy empty empty_like empty_permuted empty_strided exponential geometric log_normal multinomial new_empty new_empty_strided
nn.functional.alpha_dropout nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d nn.functional.feature_alpha_dropout
nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d nn.functional.multi_head_attention_forward nn.functional.rrelu normal pca_lowrank rand_like
randint randint_like randn randn_like svd_lowrank tensor_split uniform
""".split())
MOST_SAMPLES = 12


def run(operator, sample, device):
    """Returns the tensors that an operator returns, and the gradients of the first."""
    move = lambda value: value.detach().to(device).requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
    first, args, kwargs = tree_map(move, (sample.input, sample.args, sample.kwargs))
    if "device" in kwargs:
        kwargs["device"] = device
    results = [result for result in tree_flatten(operator(first, *args, **kwargs))[0] if isinstance(result, torch.Tensor)]
    inputs = [value for value in tree_flatten((first, args, kwargs))[0] if isinstance(value, torch.Tensor) and value.requires_grad]
    differentiable = [result for result in results if result.requires_grad]
    gradients = []
    if differentiable and inputs:
        result = differentiable[0]
        gradients = torch.autograd.grad(result, inputs, torch.ones_like(result), allow_unused=True)
    return [result.detach() for result in results] + [gradient for gradient in gradients if gradient is not None]


def difference(operator, sample, tolerance):
    try:
        expected = run(operator, sample, "cpu")
    except Exception:
        return None
    try:
        found = run(operator, sample, "cuda")
        torch.testing.assert_close(found, expected, equal_nan=True, check_device=False, check_dtype=False, atol=tolerance, rtol=tolerance)
    except Exception as error:
        return str(error).split("\n")[0]


def main():
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    dtype = getattr(torch, sys.argv[1])
    tolerance = 0.2 if dtype in (torch.float16, torch.bfloat16) else 1e-3
    counts = collections.Counter()
    for operator in op_db:
        name = operator.formatted_name
        if operator.name in UNKNOWN or dtype not in operator.dtypes or dtype not in operator.dtypesIfCUDA:
            continue
        samples = operator.sample_inputs("cpu", dtype, requires_grad=operator.supports_autograd and (dtype.is_floating_point or dtype.is_complex))
        samples = [sample for sample, _ in zip(samples, range(MOST_SAMPLES)) if sample.kwargs.get("dropout_p", 0.0) == 0.0]
        differences = [text for text in (difference(operator, sample, tolerance) for sample in samples) if text]
        counts["samples"] += len(samples)
        counts["operators"] += 1
        counts["operators that differ"] += bool(differences)
        if differences:
            print(f"{name}: {len(differences)} of {len(samples)} samples: {differences[0]}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))


main()
