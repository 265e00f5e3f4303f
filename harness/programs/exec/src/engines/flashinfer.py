# What FlashInfer needs on a simulated GPU.
import harness_guard as guard

NAME, DISTRIBUTION = "FlashInfer", "flashinfer-python"
# The first and the last version with which `ci/engines` passed.
TESTED = ("0.7.2.post1", "0.7.2.post1")
# Set by the hook: its functions for engines.
hook = None


def without_nvcc(module):
    """Replaces code that FlashInfer cannot compile, because there is no nvcc."""

    def build_or_replace(build, spec, *args, **kwargs):
        try:
            return build(spec, *args, **kwargs)
        except RuntimeError as error:
            if "find nvcc" not in str(error):
                raise
            return hook.NoKernels()

    guard.wrap(module.JitSpec, "build_and_load", build_or_replace)


# The modules to change after their execution, and those to change with `--values cpu`.
MODULES = {"flashinfer.jit.core": without_nvcc}
MODULES_WITH_VALUES = {}
