#!/usr/bin/env bash
# `fatbinary --compress-mode=size` of CUDA 13.0 (https://pypi.org/project/nvidia-cuda-nvcc, version 13.0.88) compresses machine code, which
# the other modes leave as it is. It can make PTX larger than `--compress-mode=balance` does.
#
# nvcc passes the mode on: `nvcc -Xfatbin -compress-mode=size`. The program's help says only that the option chooses the compression.
# Machine code is most of a CUDA library. Without `size`, it is compressed only with `--compress-all`. For the repetitive PTX below,
# `size` gives 8 % more bytes than `balance`.
#
# The flags of an entry name the algorithm: 0x8000 with the magic number of Zstandard, and 0x2000 in the mode `speed`. Without an option, PTX is
# compressed, with the first one. A reader of fat binaries needs both.
#
# Seen on 29 November 2026 on x86-64 Linux, without a GPU: the lines in `expected` below.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs python3 with pip and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.13 \
    --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --dest "$folder" \
    nvidia-cuda-nvcc==13.0.88
python3 -m zipfile -e "$folder"/*.whl "$folder/files"
bin=$(dirname "$(find "$folder/files" -name fatbinary)")
chmod +x "$bin"/*
# A kernel that adds and stores $1 times.
kernel() {
    cat <<PTX
.version 7.8
.target sm_80
.address_size 64
.visible .entry kernel(.param .u64 to)
{
  .reg .b64 %a;
  .reg .b32 %r;
  ld.param.u64 %a, [to];
  mov.u32 %r, 1;
PTX
    for ((i = 0; i < $1; i++)); do
        printf '  add.u32 %%r, %%r, %d;\n  st.global.u32 [%%a+%d], %%r;\n' "$i" $((4 * i))
    done
    printf '  ret;\n}\n'
}
kernel 400 >"$folder/small.ptx"
kernel 20000 >"$folder/large.ptx"
"$bin/ptxas" -arch=sm_80 "$folder/small.ptx" -o "$folder/small.cubin"
seen=$(
    for image in elf:small.cubin ptx:large.ptx; do
        for mode in none speed balance default size; do
            "$bin/fatbinary" -64 --create="$folder/out" "--image3=kind=${image%:*},sm=80,file=$folder/${image#*:}" --compress-mode="$mode"
            # The flags are in bytes 40 to 43 of the entry's header, after the 16 bytes of the file's header.
            flags=$(od --address-radix=n --format=x4 --skip-bytes=56 --read-bytes=4 "$folder/out")
            echo "${image#*:}, $mode: $(stat --format=%s "$folder/out") bytes, flags ${flags# }"
            rm "$folder/out"
        done
    done
)
expected='small.cubin, none: 15864 bytes, flags 00000011
small.cubin, speed: 15864 bytes, flags 00000011
small.cubin, balance: 15864 bytes, flags 00000011
small.cubin, default: 15864 bytes, flags 00000011
small.cubin, size: 3832 bytes, flags 00008011
large.ptx, none: 1046368 bytes, flags 00000011
large.ptx, speed: 190248 bytes, flags 00002011
large.ptx, balance: 36968 bytes, flags 00008011
large.ptx, default: 36968 bytes, flags 00008011
large.ptx, size: 40024 bytes, flags 00008011'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
