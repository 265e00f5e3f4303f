"""Starts of inference servers after which a DGX Spark hung, as their public reports describe the memory: in GiB, or in 1/32 of it if the host's memory
matters, because that is real here. The first argument is the report: 46307, 56824 or 55569 of vLLM."""
import sys

import torch

GIB, MIB = 1 << 30, 1 << 20
# Memory that stays.
kept = []


def on_gpu(size):
    kept.append(torch.empty(int(size), dtype=torch.uint8, device="cuda"))


def on_host(size):
    kept.append(bytearray(b"1") * int(size))


def load_weights(on_the_gpu, on_the_host):
    """Loads the checkpoint in shards, through memory of the host."""
    for _ in range(8):
        shard = bytearray(b"1") * (32 * MIB)
        on_gpu(on_the_gpu / 8)
        del shard
    on_host(on_the_host)


def profile_run(activations, compilers):
    """The largest batch, while the kernels are compiled."""
    heap = bytearray(b"1") * int(compilers)
    batch = []
    for _ in range(4):
        batch.append(torch.empty(int(activations / 4), dtype=torch.uint8, device="cuda"))
    del heap, batch
    torch.cuda.empty_cache()


def allocate_kv_cache(utilization):
    """Fills the budget of the GPU, which ignores what the host uses."""
    _, total = torch.cuda.mem_get_info()
    on_gpu(utilization * total - torch.cuda.memory_reserved())


def capture_graphs(on_the_gpu, on_the_host):
    for _ in range(8):
        on_host(on_the_host / 8)
        on_gpu(on_the_gpu / 8)


def prefill(chunks):
    """The logits of each chunk of a long prompt are larger than those before, so no cached block fits them."""
    for chunk in range(chunks):
        torch.empty((128 + 4 * chunk) * MIB, dtype=torch.uint8, device="cuda")


if sys.argv[1] == "46307":
    # https://github.com/vllm-project/vllm/issues/46307: 48 GiB of weights, and 112 of 119.7 GiB in use in the profile run. Compilers took 30 GiB in
    # https://github.com/eugr/spark-vllm-docker/pull/286.
    load_weights(48 * GIB / 32, 5 * GIB / 32)
    profile_run(40 * GIB / 32, 30 * GIB / 32)
    allocate_kv_cache(0.7)
elif sys.argv[1] == "56824":
    # https://github.com/vllm-project/vllm/issues/56824: 82 GiB on the GPU and 23.5 GiB of the host after the weights; then the host's part grows by 10 GiB, and
    # the GPU's by 12.
    load_weights(82 * GIB / 32, 18 * GIB / 32)
    profile_run(GIB / 32, GIB / 32)
    allocate_kv_cache(0.7)
    capture_graphs(12 * GIB / 32, 10 * GIB / 32)
else:
    # https://github.com/vllm-project/vllm/issues/55569: a prompt of 231,000 tokens, after a start with 85 % of the memory.
    load_weights(75 * GIB, GIB)
    profile_run(GIB, GIB / 4)
    allocate_kv_cache(0.85)
    prefill(96)
print("ready")
