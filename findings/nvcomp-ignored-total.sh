#!/usr/bin/env bash
# Four compressors of nvCOMP 6.0.0.12 (https://pypi.org/project/nvidia-libnvcomp-cu13) ignore the total size of the data in the size of their temporary
# memory. Deflate can ask for 885 times the data.
#
# `nvcompBatchedDeflateCompressGetTempSize` takes the number of chunks, the largest chunk and `max_total_uncompressed_bytes`, described as an upper
# bound on the size of all chunks. Deflate, GDeflate, Gzip and LZ4 return the same for each total: the number of chunks times the memory of
# the largest. So one large chunk among many small ones makes a batch fail that needs little. The decompressor of Zstandard follows the total.
# If chunks are equal, Deflate needs nine times the data at 1 MiB, and 5.5 times at 64 KiB.
#
# The script needs no GPU: these functions count on the host. It calls them for 100000 chunks of at most 1 MiB, and prints MiB of temporary memory
# for two totals: 1 GiB, and all chunks as large as the largest.
#
# Seen on 30 November 2026 on x86-64 Linux, without a GPU: the lines in `expected` below. Zstandard's compressor is not among them, because it
# returns an error without a GPU.
#
# Exit code: 0 if the output is the same; 1 if it changed. Needs g++, python3 with pip, and PyPI.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" \
    nvidia-libnvcomp-cu13==6.0.0.12 nvidia-cuda-runtime==13.5.37 nvidia-cuda-crt==13.5.37
cat >"$folder/program.cpp" <<'CPP'
#include <cstdio>
#include <nvcomp/deflate.h>
#include <nvcomp/gdeflate.h>
#include <nvcomp/gzip.h>
#include <nvcomp/lz4.h>
#include <nvcomp/zstd.h>

constexpr size_t MiB = 1 << 20, chunks = 100000;

template <typename Function, typename Options>
void show(char const* name, Function function, Options options) {
  printf("%s:", name);
  for (size_t total : {1024 * MiB, chunks * MiB}) {
    size_t size = 0;
    if (function(chunks, MiB, options, &size, total, nullptr) != nvcompSuccess) printf(" refused");
    printf(" %zu", size / MiB);
  }
  printf("\n");
}

int main() {
  show("Deflate, compress", nvcompBatchedDeflateCompressGetTempSize, nvcompBatchedDeflateCompressDefaultOpts);
  show("GDeflate, compress", nvcompBatchedGdeflateCompressGetTempSize, nvcompBatchedGdeflateCompressDefaultOpts);
  show("Gzip, compress", nvcompBatchedGzipCompressGetTempSize, nvcompBatchedGzipCompressDefaultOpts);
  show("LZ4, compress", nvcompBatchedLZ4CompressGetTempSize, nvcompBatchedLZ4CompressDefaultOpts);
  show("Zstandard, decompress", nvcompBatchedZstdDecompressGetTempSize, nvcompBatchedZstdDecompressDefaultOpts);
}
CPP
nvcomp=$folder/nvidia/libnvcomp
g++ -o "$folder/program" "$folder/program.cpp" -I"$nvcomp/include" -I"$(dirname "$(find "$folder" -name cuda_runtime.h)")" \
    "$nvcomp/lib64/libnvcomp.so.6"
seen=$(LD_LIBRARY_PATH=$nvcomp/lib64 "$folder/program")
expected='Deflate, compress: 906253 906253
GDeflate, compress: 906253 906253
Gzip, compress: 600251 600251
LZ4, compress: 3125 3125
Zstandard, decompress: 3733 305291'
echo "$seen"
if [[ $seen != "$expected" ]]; then
    echo "the output changed; expected:" >&2
    echo "$expected" >&2
    exit 1
fi
