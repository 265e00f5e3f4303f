# What the CuTe DSL needs on a simulated GPU.
import harness_guard as guard

NAME, DISTRIBUTION = "CuTe DSL", "nvidia-cutlass-dsl"
# The first and the last version with which `ci/engines` passed.
TESTED = ("4.8.0", "4.8.0")
# Set by the hook: its functions for engines.
hook = None


def without_cute(module):
    """Replaces kernels of the CuTe DSL. Its compiled code contains a CUDA runtime that needs functions of NVIDIA's driver without a name."""
    guard.wrap(module.CompileCallable, "__call__", lambda compile, *args, **kwargs: hook.NoKernels())


# The modules to change after their execution, and those to change with `--values cpu`.
MODULES = {"cutlass.base_dsl.compiler": without_cute}
MODULES_WITH_VALUES = {}
