"""Makes what `harness exec` installs in this process fail, part after part: each installed function itself, and each name that its modules use. The program must
see what it sees without failures. With the argument `end`, everything fails until the end of the process.
"""
import contextlib
import gc
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import unittest

import torch

guard, hook = sys.modules["harness_guard"], sys.modules["sitecustomize"]
own = [module for name, module in sys.modules.items() if name.startswith("harness_") and module is not guard] + [hook]
folder = tempfile.mkdtemp()
failed = 0


def error_of(call, *args):
    try:
        call(*args)
    except BaseException as error:
        return "".join(traceback.format_exception(error))
    return "no error"


def ends_by(end):
    child = os.fork()
    if child == 0:
        end()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fails():
    raise ValueError("of the program")


def runs_out_of_memory():
    torch.empty(1 << 50, device="cuda")


def work(is_hook):
    """What the program sees of the functions that are replaced. Those of the hook also run at the end of processes."""
    tensor = torch.ones(4, 4, device="cuda", requires_grad=True)
    yield tensor.shape, tensor.is_cuda
    (tensor @ tensor).sum().backward()
    yield tensor.grad.shape, type(tensor.grad.sum().item()), torch.rand(3, device="cuda").shape
    torch.nonzero(tensor.detach())
    yield error_of(runs_out_of_memory).splitlines()[-1][:40], error_of(torch.ones(2, device="cuda").view, 3)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    yield torch.cuda.memory_allocated() >= 64, torch.cuda.max_memory_allocated() >= 64
    torch.cuda.set_per_process_memory_fraction(1.0)
    yield error_of(torch._C._cuda_setMemoryFraction, 2.0, "no device").splitlines()[-1]
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        side = torch.ones(4, device="cuda")
        side.record_stream(torch.cuda.default_stream())
    event = torch.cuda.Event()
    event.record()
    yield type(event.query())
    torch.cuda.memory._record_memory_history(None)
    yield error_of(sys.exit, 3), error_of(sys.exit), error_of(sys.exit, 1, 2), error_of(os.execv, "/nowhere", ["nowhere"])
    if is_hook:
        yield ends_by(lambda: os._exit(7)), subprocess.run(["true"]).returncode
    thread = threading.Thread(target=fails, name="failing")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        thread.start()
        thread.join()
    yield said.getvalue()
    path = os.path.join(folder, "file")
    torch.save(tensor, path)
    yield torch.load(path, weights_only=True).shape, error_of(open, folder)
    os.remove(path)
    os.mkfifo(path)
    os.rename(path, path + "2")
    os.remove(path + "2")
    yield importlib.util.find_spec("psutil.nothing_of_this_name") if importlib.util.find_spec("psutil") else None
    yield error_of(torch.ops.load_library, "/nowhere.so").splitlines()[-1]
    result = unittest.TestResult()
    unittest.FunctionTestCase(fails).run(result)
    yield result.errors[0][1]


def seen(is_hook):
    return list(work(is_hook))


def failing(*args, **kwargs):
    global failed
    failed += 1
    raise OSError("a failure of the hook")


class Failing:
    """In place of a module."""

    __getattr__ = failing


def installed():
    """The functions of ours that the program calls, by their code: cells of guarded functions."""
    found = {}
    for function in gc.get_objects():
        if type(function) is types.FunctionType and function.__code__.co_filename == guard.__file__:
            if function.__code__.co_name == "guarded":
                names = function.__code__.co_freevars
                cell = function.__closure__[names.index("ours" if "ours" in names else "function")]
                ours = cell.cell_contents
                code = getattr(ours, "__code__", None)
                if code is not None and code.co_filename.startswith(os.path.dirname(guard.__file__)):
                    found.setdefault(code, []).append(cell)
    return found


def parts():
    """Functions that make a part fail and let it work again, by name."""

    def fail_name(module, name, value, failure):
        return lambda: setattr(module, name, failure), lambda: setattr(module, name, value)

    for code, cells in installed().items():
        before = [cell.cell_contents for cell in cells]

        def fail(cells=cells):
            for cell in cells:
                cell.cell_contents = failing

        def restore(cells=cells, before=before):
            for cell, function in zip(cells, before):
                cell.cell_contents = function

        yield "%s %s" % (os.path.basename(code.co_filename), code.co_name), fail, restore
    for module in own:
        for name, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType):
                yield "%s.%s" % (module.__name__, name), *fail_name(module, name, value, Failing())
            elif isinstance(value, (types.FunctionType, type)) and not name.startswith("__"):
                yield "%s.%s" % (module.__name__, name), *fail_name(module, name, value, failing)


seen(True)
expected = {is_hook: seen(is_hook) for is_hook in (True, False)}
guard._MOST_PLACES = 1 << 20
reached, different = 0, []
if "end" not in sys.argv:
    for name, fail, restore in list(parts()):
        before = failed
        fail()
        try:
            is_hook = not name.startswith(("harness_cpu", "harness_torch", "harness_random", "harness_small", "cpu_values"))
            found = seen(is_hook)
        except BaseException as error:
            found = ["".join(traceback.format_exception(error))]
        finally:
            restore()
        reached += failed > before
        if found != expected[is_hook]:
            different.append((name, [pair for pair in zip(found, expected[is_hook]) if pair[0] != pair[1]] or found[-1:]))
    for name, pairs in different:
        print(name, *pairs, sep="\n    ")
    print(len(different), "parts change what the program sees;", f"at least {reached // 20 * 20} were reached")
else:
    for name, fail, restore in list(parts()):
        fail()
    print("the program ends")
    sys.exit(3)
