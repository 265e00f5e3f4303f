#!/usr/bin/env bash
# ptxas 13.0 writes the compute capability to another byte of the ELF header than ptxas 12.9, for the same kernel and target. The field
# with a kernel's registers depends on the target alone: from compute capability 9.0 on it is empty.
#
# ptxas 12.9 (https://pypi.org/project/nvidia-cuda-nvcc-cu12, version 12.9.86) writes the capability into the lowest byte of the ELF flags,
# for example 80 for 8.0. For capability 10.0 it writes it into the second byte, and the lowest byte is 2. ptxas 13.0
# (https://pypi.org/project/nvidia-cuda-nvcc, version 13.0.88) uses the second byte for all capabilities. The lowest byte is then 2 or 4, and the ABI
# version of the file is 8 instead of 7.
#
# Up to capability 8.9, the highest byte of `sh_info` of a kernel's section is its number of registers. From 9.0 on it is 0, with both
# releases. The attribute EIATTR_REGCOUNT of the section `.nv.info` (0x2f) has the number for all.
#
# Seen on 29 November 2026 on x86-64 Linux, without a GPU: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3 with pip, binutils and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
seen=$(
    for package in nvidia-cuda-nvcc-cu12==12.9.86 nvidia-cuda-nvcc==13.0.88; do
        release=${package##*=}
        python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.13 \
            --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux1_x86_64 \
            --dest "$folder/$release" "$package"
        python3 -m zipfile -e "$folder/$release"/*.whl "$folder/$release/files"
        ptxas=$(find "$folder/$release/files" -name ptxas)
        chmod +x "$ptxas"
        for capability in 75 80 89 90 100; do
            cat >"$folder/kernel.ptx" <<PTX
.version 8.6
.target sm_$capability
.address_size 64
.visible .entry kernel(.param .u64 to)
{
  .reg .b64 %address;
  ld.param.u64 %address, [to];
  st.global.u32 [%address], 1;
  ret;
}
PTX
            "$ptxas" -v -arch="sm_$capability" "$folder/kernel.ptx" -o "$folder/kernel.cubin" 2>"$folder/printed"
            flags=$(readelf --file-header "$folder/kernel.cubin" 2>/dev/null | sed -n 's/.*Flags: *0x\([0-9a-f]*\).*/\1/p')
            version=$(readelf --file-header "$folder/kernel.cubin" 2>/dev/null | sed -n 's/.*ABI Version: *//p')
            info=$(readelf --sections --wide "$folder/kernel.cubin" 2>/dev/null |
                sed -n 's/.*\.text\.kernel .* AX *[0-9]* *\([0-9]*\) *[0-9]*$/\1/p')
            echo "ptxas $release, sm_$capability: ABI $version, flags' bytes $((16#$flags & 255)) and $((16#$flags >> 8 & 255));" \
                "printed $(grep -o 'Used [0-9]* registers' "$folder/printed"), section has $((info >> 24))"
        done
    done
)
expected="ptxas 12.9.86, sm_75: ABI 7, flags' bytes 75 and 5; printed Used 4 registers, section has 4
ptxas 12.9.86, sm_80: ABI 7, flags' bytes 80 and 5; printed Used 8 registers, section has 8
ptxas 12.9.86, sm_89: ABI 7, flags' bytes 89 and 5; printed Used 8 registers, section has 8
ptxas 12.9.86, sm_90: ABI 7, flags' bytes 90 and 5; printed Used 8 registers, section has 0
ptxas 12.9.86, sm_100: ABI 8, flags' bytes 2 and 100; printed Used 8 registers, section has 0
ptxas 13.0.88, sm_75: ABI 8, flags' bytes 4 and 75; printed Used 4 registers, section has 4
ptxas 13.0.88, sm_80: ABI 8, flags' bytes 4 and 80; printed Used 8 registers, section has 8
ptxas 13.0.88, sm_89: ABI 8, flags' bytes 4 and 89; printed Used 8 registers, section has 8
ptxas 13.0.88, sm_90: ABI 8, flags' bytes 4 and 90; printed Used 8 registers, section has 0
ptxas 13.0.88, sm_100: ABI 8, flags' bytes 2 and 100; printed Used 8 registers, section has 0"
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
