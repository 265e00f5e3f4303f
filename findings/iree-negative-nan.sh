#!/usr/bin/env bash
# IREE 3.13.0 (https://pypi.org/project/iree-base-compiler) converts the NaN of E4M3 whose sign is negative to -480. Compiled for the CPU, (-2)^3 is
# NaN, and the sine of a million is wrong in the second digit.
#
# StableHLO's `convert` keeps a NaN, and `power` and `sine` follow IEEE 754. E4M3 has two NaNs, with the bits 0x7f and 0xff. The first one stays a
# NaN. The other one becomes a number that the format does not have, because its largest one is 448. For the CPU, a power is the exponential of a
# logarithm, which is NaN for negative numbers; an open pull request of LLVM repairs it (https://github.com/llvm/llvm-project/pull/193231). Constant
# exponents of 2 and 3 are products, and right. The backend `vmvx` has the right powers and sines.
#
# Seen on 1 December 2026 on x86-64 Linux, without a GPU: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3.11 or later with venv, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check iree-base-compiler==3.13.0 iree-base-runtime==3.13.0 ml_dtypes==0.6.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import iree.compiler
import iree.runtime
import ml_dtypes
import numpy


def run(backend, operation, types, *arrays):
    names = [f"%{index}" for index in range(len(arrays))]
    arguments = ", ".join(f"{name}: {kind}" for name, kind in zip(names, types))
    body = f"%result = stablehlo.{operation} {', '.join(names)} : ({', '.join(types[:-1])}) -> {types[-1]}"
    program = f"func.func @main({arguments}) -> {types[-1]} {{\n{body}\nreturn %result : {types[-1]}\n}}"
    options = ["--iree-llvmcpu-target-cpu=generic"]
    binary = iree.compiler.compile_str(program, target_backends=[backend], input_type="stablehlo", extra_args=options)
    context = iree.runtime.SystemContext(config=iree.runtime.Config("local-sync"))
    context.add_vm_module(iree.runtime.VmModule.copy_buffer(context.instance, binary))
    return context.modules.module.main(*arrays).to_host()


nans = numpy.array([0x7F, 0xFF, 0xFE], numpy.uint8).view(ml_dtypes.float8_e4m3fn)
base = numpy.array([-2, -3, 2], numpy.float32)
exponent = numpy.array([3, 2, 3], numpy.float32)
angles = numpy.array([1, 1000, 1000000], numpy.float32)
float_type = "tensor<3xf32>"
for backend in ("llvm-cpu", "vmvx"):
    print(f"{backend}: bits 0x7f, 0xff and 0xfe:", *run(backend, "convert", ["tensor<3xf8E4M3FN>", float_type], nans))
    print(f"{backend}: (-2)^3, (-3)^2 and 2^3:", *run(backend, "power", [float_type] * 3, base, exponent).round(3))
    print(f"{backend}: sines of 1, 1000 and 1000000:", *run(backend, "sine", [float_type] * 2, angles).round(3))
print("NumPy: sines of 1, 1000 and 1000000:", *numpy.sin(angles).round(3))
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py")
expected='llvm-cpu: bits 0x7f, 0xff and 0xfe: nan -480.0 -448.0
llvm-cpu: (-2)^3, (-3)^2 and 2^3: nan nan 8.0
llvm-cpu: sines of 1, 1000 and 1000000: 0.841 0.827 -0.374
vmvx: bits 0x7f, 0xff and 0xfe: nan -480.0 -448.0
vmvx: (-2)^3, (-3)^2 and 2^3: -8.0 9.0 8.0
vmvx: sines of 1, 1000 and 1000000: 0.841 0.827 -0.35
NumPy: sines of 1, 1000 and 1000000: 0.841 0.827 -0.35'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
