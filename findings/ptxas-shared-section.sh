#!/usr/bin/env bash
# From compute capability 9.0 on, the size of a kernel's section of shared memory in an ELF file of ptxas 13.0
# (https://pypi.org/project/nvidia-cuda-nvcc, version 13.0.88) is 1024 bytes more than the kernel declares.
#
# A cubin has a section `.nv.shared.NAME` for each kernel with static shared memory. Up to capability 8.9 its size is that of the
# declared variables, which `ptxas -v` prints too. From 9.0 on, the section also has the 1024 bytes that the system reserves in each
# block. `ptxas -v` still prints the declared size. A tool that reads the section as the kernel's shared memory, and then adds the
# reserved bytes of the device attribute, counts them twice.
#
# Seen on 29 November 2026 on x86-64 Linux, without a GPU: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3 with pip, binutils and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.13 \
    --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --dest "$folder" \
    nvidia-cuda-nvcc==13.0.88
python3 -m zipfile -e "$folder"/*.whl "$folder/files"
ptxas=$(find "$folder/files" -name ptxas)
chmod +x "$ptxas"
seen=$(
    for capability in 75 80 86 89 90 100 120; do
        cat >"$folder/kernel.ptx" <<PTX
.version 8.8
.target sm_$capability
.address_size 64
.visible .entry kernel(.param .u64 to)
{
  .shared .align 4 .b8 buffer[4096];
  .reg .b64 %address;
  .reg .b32 %value;
  ld.param.u64 %address, [to];
  ld.shared.u32 %value, [buffer];
  st.global.u32 [%address], %value;
  ret;
}
PTX
        "$ptxas" -v -arch="sm_$capability" "$folder/kernel.ptx" -o "$folder/kernel.cubin" 2>"$folder/printed"
        section=$(readelf --sections --wide "$folder/kernel.cubin" 2>/dev/null |
            sed -n 's/.*\.nv\.shared\.kernel *NOBITS *[0-9a-f]* *[0-9a-f]* *\([0-9a-f]*\) .*/\1/p')
        echo "sm_$capability: printed $(grep -o '[0-9]* bytes smem' "$folder/printed"), section $((16#$section)) bytes"
    done
)
expected='sm_75: printed 4096 bytes smem, section 4096 bytes
sm_80: printed 4096 bytes smem, section 4096 bytes
sm_86: printed 4096 bytes smem, section 4096 bytes
sm_89: printed 4096 bytes smem, section 4096 bytes
sm_90: printed 4096 bytes smem, section 5120 bytes
sm_100: printed 4096 bytes smem, section 5120 bytes
sm_120: printed 4096 bytes smem, section 5120 bytes'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
