#!/usr/bin/env bash
# The modules of jax-cuda13-plugin 0.12.0.1 (https://pypi.org/project/jax-cuda13-plugin) define functions with the names of the CUDA
# runtime, but contain no runtime.
#
# A module that is linked with `nvcc`'s default has the names of the runtime's functions in its symbol table, and does not need
# libcudart. The modules of this package look the same: none needs libcudart, and each defines 418 functions of the runtime. Each of
# these functions only forwards to the library that it opens at the first call. They have no size in the symbol table. Some of them
# do not exist in the runtime of CUDA 13, for which the package is built (nvidia-cuda-runtime 13.5.37). A tool that finds a linked-in
# runtime or its release by names is therefore wrong.
#
# Seen on 29 November 2026 on x86-64 Linux, without a GPU: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3 with pip, binutils and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fetch() {
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.13 \
        --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --dest "$folder" "$1"
}
fetch jax-cuda13-plugin==0.12.0.1
fetch nvidia-cuda-runtime==13.5.37
for wheel in "$folder"/*.whl; do
    python3 -m zipfile -e "$wheel" "$folder/files"
done
module=$folder/files/jax_cuda13_plugin/_versions.so
runtime=$(find "$folder/files" -name 'libcudart.so.13')
# The functions of the runtime that a module defines, each with its size.
functions() {
    readelf --syms --wide "$1" | awk '$4 == "FUNC" && $7 != "UND" && $8 ~ /^_?_?cuda[A-Z]/ { print $8, $3 }' | sort -u
}
functions "$module" >"$folder/module"
functions "$runtime" | sed 's/@[^ ]*//' >"$folder/runtime"
seen=$(
    echo "needs libcudart: $(readelf --dynamic --wide "$module" | grep -c 'NEEDED.*cudart' || true)"
    echo "functions of the runtime: $(wc -l <"$folder/module")"
    echo "with a size: $(awk '$2 > 0' "$folder/module" | wc -l)"
    for name in cudaThreadExit cudaMemAdvise_v2 cudaGetDeviceProperties_v2; do
        echo "$name: in the module $(grep -c "^$name " "$folder/module" || true), in CUDA 13 $(grep -c "^$name " "$folder/runtime" || true)"
    done
)
expected='needs libcudart: 0
functions of the runtime: 418
with a size: 0
cudaThreadExit: in the module 1, in CUDA 13 0
cudaMemAdvise_v2: in the module 1, in CUDA 13 0
cudaGetDeviceProperties_v2: in the module 1, in CUDA 13 0'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
