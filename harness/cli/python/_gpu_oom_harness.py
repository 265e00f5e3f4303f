"""Loads a module of the package `harness` from its file, because a program may have a package `harness` too, and must get its own."""
import importlib.util
import os


def __getattr__(name):
    if name not in ("observe", "pytest_plugin", "snapshot", "suite"):
        raise AttributeError(f"there is no module `{name}`")
    path = os.path.join(os.path.dirname(__file__), "harness", f"{name}.py")
    if not os.path.exists(path):
        # Some systems install modules and packages into different folders.
        from importlib.metadata import distribution

        path = distribution("gpu-oom-harness").locate_file(f"harness/{name}.py")
    spec = importlib.util.spec_from_file_location(f"harness.{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    globals()[name] = module
    return module
