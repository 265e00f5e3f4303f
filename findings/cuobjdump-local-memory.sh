#!/usr/bin/env bash
# `cuobjdump --dump-resource-usage` of CUDA 13.5 (https://pypi.org/project/nvidia-cuda-cuobjdump, version 13.5.37) prints `LOCAL:0` for kernels that use
# local memory. In a file that is not linked, it prints `STACK:0` too.
#
# CUDA calls an array of a thread local memory, and `cudaFuncGetAttributes` returns its size as `localSizeBytes`. cuobjdump prints it as STACK.
# `ptxas -c`, which `nvcc -rdc=true` runs, writes a file for nvlink. Its kernels and functions have neither STACK nor LOCAL, although ptxas says
# their frames. From compute capability 9.0 on, its functions have no registers either. In the linked file, STACK of the kernel has the frames
# of the functions that it calls.
#
# The memory counts: the driver needs the local memory of one thread for each thread that the GPU can hold. For the kernel below, that is
# 40168 B * 2048 threads * 132 multiprocessors = 10.1 GiB on an H100, which the script does not measure.
#
# Seen on 30 November 2026 on x86-64 Linux, without a GPU, also with ptxas 13.0.88 (https://pypi.org/project/nvidia-cuda-nvcc): the lines in
# `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3 with pip and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.13 \
    --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --dest "$folder" \
    nvidia-cuda-nvcc==13.5.37 nvidia-cuda-cuobjdump==13.5.37
for wheel in "$folder"/*.whl; do
    python3 -m zipfile -e "$wheel" "$folder/files"
done
bin=$(dirname "$(find "$folder/files" -name cuobjdump)")
chmod +x "$bin"/*
# The STACK, LOCAL and REG of each function of a file.
resources() {
    "$bin/cuobjdump" --dump-resource-usage "$2" |
        sed -n '/Function/{N;s/ *Function \(.*\):\n *\(REG:[0-9]*\) \(STACK:[0-9]*\) .*\(LOCAL:[0-9]*\).*/\1 \3 \4 \2/p}' |
        sort | while read -r line; do echo "$1: $line"; done
}
seen=$(
    for capability in 80 90; do
        # A kernel with an array of 160 B calls a function with one of 40000 B.
        cat >"$folder/kernel.ptx" <<PTX
.version 8.6
.target sm_$capability
.address_size 64
.func (.reg .u32 out) leaf(.reg .u32 in)
{
  .local .align 16 .b8 array[40000];
  .reg .b64 %at, %index;
  mov.u64 %at, array;
  cvt.u64.u32 %index, in;
  add.u64 %at, %at, %index;
  st.local.u32 [%at], in;
  ld.local.u32 out, [%at+16];
  ret;
}
.visible .entry kernel(.param .u64 to, .param .u32 in)
{
  .local .align 16 .b8 array[160];
  .reg .b64 %to, %at, %index;
  .reg .b32 %in, %out;
  ld.param.u64 %to, [to];
  ld.param.u32 %in, [in];
  mov.u64 %at, array;
  cvt.u64.u32 %index, %in;
  add.u64 %at, %at, %index;
  st.local.u32 [%at], %in;
  call.uni (%out), leaf, (%in);
  st.global.u32 [%to], %out;
  ld.local.u32 %out, [%at+16];
  st.global.u32 [%to+4], %out;
  ret;
}
PTX
        "$bin/ptxas" -v -c -arch="sm_$capability" "$folder/kernel.ptx" -o "$folder/kernel.cubin" 2>&1 |
            sed -n '/properties for/{N;s/.*properties for \([a-z]*\)\n *\([0-9]* bytes stack frame\).*/\1 \2/p}' |
            sort | while read -r line; do echo "sm_$capability, ptxas: $line"; done
        resources "sm_$capability, not linked" "$folder/kernel.cubin"
        "$bin/nvlink" -arch="sm_$capability" "$folder/kernel.cubin" -o "$folder/linked.cubin"
        resources "sm_$capability, linked" "$folder/linked.cubin"
    done
)
expected='sm_80, ptxas: kernel 160 bytes stack frame
sm_80, ptxas: leaf 40008 bytes stack frame
sm_80, not linked: kernel STACK:0 LOCAL:0 REG:24
sm_80, not linked: leaf STACK:0 LOCAL:0 REG:24
sm_80, linked: kernel STACK:40168 LOCAL:0 REG:24
sm_80, linked: leaf STACK:0 LOCAL:0 REG:24
sm_90, ptxas: kernel 160 bytes stack frame
sm_90, ptxas: leaf 40008 bytes stack frame
sm_90, not linked: kernel STACK:0 LOCAL:0 REG:24
sm_90, not linked: leaf STACK:0 LOCAL:0 REG:0
sm_90, linked: kernel STACK:40168 LOCAL:0 REG:24
sm_90, linked: leaf STACK:0 LOCAL:0 REG:0'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
