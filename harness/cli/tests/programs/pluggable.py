"""Three training steps of a small residual network, with PyTorch's own allocator or one of a shared library. Writes a memory snapshot at the end.

Arguments: the snapshot to write, then optionally the library, the prefix of its functions, and `change` (CUDAPluggableAllocator) or `pool` (MemPool).
"""

import ctypes
import gc
import sys

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else nn.Identity()

    def forward(self, x):
        return torch.relu(self.body(x) + self.skip(x))


def network():
    widths = [(3, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 256, 2)]
    return nn.Sequential(*[Residual(*width) for width in widths], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000))


def train():
    torch.manual_seed(1)
    model = network().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in [16, 24, 16]:
        images, labels = torch.randn(batch, 3, 128, 128).cuda(), torch.zeros(batch, dtype=torch.long).cuda()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    out, *library = sys.argv[1:]
    gc.disable()
    if not library:
        torch.cuda.memory._record_memory_history(stacks="python")
        train()
        torch.cuda.memory._dump_snapshot(out)
        return
    path, prefix, way = library
    functions = ctypes.CDLL(path)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(path, prefix + "_malloc", prefix + "_free")
    if way == "pool":
        with torch.cuda.use_mem_pool(torch.cuda.MemPool(allocator.allocator())):
            train()
            try:
                torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
                print("no error")
            except torch.OutOfMemoryError:
                print("torch.OutOfMemoryError")
    else:
        torch.cuda.memory.change_current_allocator(allocator)
        record_stream = ctypes.cast(getattr(functions, prefix + "_record_stream"), ctypes.c_void_p).value
        allocator.allocator().set_record_stream_fn(record_stream)
        train()
    if getattr(functions, prefix + "_snapshot")(0, out.encode()) != 0:
        raise RuntimeError(ctypes.c_char_p(functions.harness_allocator_last_error()).value)


main()
