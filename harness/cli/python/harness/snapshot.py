"""Memory snapshots of PyTorch, with what `harness explain` also reads."""
import gc


def take(torch):
    """Returns a snapshot and a list of problems. The snapshot also has the addresses of the program's parameters, gradients and optimizer state, from which
    `harness explain` takes categories, and the statistics of pinned host memory. It has no frames of `harness exec`."""
    problems = []
    snapshot = torch.cuda.memory._snapshot()
    if hasattr(torch, "_harness_remove_own_frames"):
        torch._harness_remove_own_frames(snapshot)
    try:
        snapshot["harness_tensors"] = tensors(torch)
    except Exception as error:
        problems.append(f"the snapshot does not name the program's tensors: {reason(error)}")
    try:
        host = getattr(torch.cuda, "host_memory_stats", dict)()
        if host.get("num_host_alloc"):
            snapshot["harness_host_memory"] = {"torch": str(torch.__version__), **host}
    except Exception as error:
        problems.append(f"the snapshot lacks pinned host memory: {reason(error)}")
    return snapshot, problems


def tensors(torch):
    """Returns the addresses of the program's tensors. Runs no code of the program: neither `isinstance`, nor properties of its classes."""
    found = {"parameters": set(), "gradients": set(), "optimizer_state": set()}
    base = torch._C.TensorBase

    def add(category, tensor):
        if issubclass(type(tensor), base) and base.is_cuda.__get__(tensor):
            try:
                found[category].add(base.untyped_storage(tensor).data_ptr())
            except Exception:
                # A tensor without memory.
                return

    with torch._C.DisableTorchFunctionSubclass():
        for item in gc.get_objects():
            if issubclass(type(item), torch.nn.Module):
                attributes = object.__getattribute__(item, "__dict__")
                for kind in ("_parameters", "_buffers"):
                    for tensor in list((attributes.get(kind) or {}).values()):
                        add("parameters", tensor)
                        # PyTorch warns if a program asks for other gradients.
                        if issubclass(type(tensor), base) and base.is_leaf.__get__(tensor):
                            add("gradients", base.grad.__get__(tensor))
            elif issubclass(type(item), torch.optim.Optimizer):
                states = object.__getattribute__(item, "__dict__").get("state") or {}
                for state in list(states.values()):
                    for tensor in list(state.values()) if issubclass(type(state), dict) else ():
                        add("optimizer_state", tensor)
    return {category: sorted(addresses) for category, addresses in found.items()}


def reason(error):
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__
