# The workspaces of the convolutions and products of harness/gpu/settings/src/workspaces/measured.tsv, which were measured on two GPUs.
import json, torch
from torch.nn.functional import conv2d

def workspace(operation):
    operation()
    torch.cuda.reset_peak_memory_stats()
    result = operation()
    stats = torch.cuda.memory_stats()
    return stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"]

def convolution(kind, batch, channels, side, kernel=3):
    image = torch.empty(batch, channels, side, side, device="cuda", dtype=kind)
    filters = torch.empty(channels, channels, kernel, kernel, device="cuda", dtype=kind)
    return workspace(lambda: conv2d(image, filters, padding=kernel // 2))

def product(kind):
    matrix = torch.empty(1024, 1024, device="cuda", dtype=kind)
    return workspace(lambda: matrix @ matrix)

print(json.dumps({
    "bf16-n2-c64-h128": convolution(torch.bfloat16, 2, 64, 128),
    "fp32-n2-c64-h128": convolution(torch.float32, 2, 64, 128),
    "fp32-n4-c128-h64": convolution(torch.float32, 4, 128, 64),
    "fp32-1x1": convolution(torch.float32, 2, 64, 128, 1),
    "mm-bf16": product(torch.bfloat16),
    "mm-fp32": product(torch.float32),
}))
