# Two steps of ResNet-152 (https://arxiv.org/abs/1512.03385) with momentum on BATCH images of 224 x 224; AMP=1 in mixed precision, CHECKPOINT=1 with each
# block checkpointed.
import os

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

CHECKPOINT = os.environ.get("CHECKPOINT") == "1"


class Bottleneck(nn.Module):
    def __init__(self, channels, width, stride):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width))
        self.relu = nn.ReLU(inplace=True)
        self.short = None
        if stride != 1 or channels != 4 * width:
            self.short = nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def block(self, x):
        y = self.main(x)
        y += x if self.short is None else self.short(x)
        return self.relu(y)

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False) if CHECKPOINT else self.block(x)


layers, channels = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)], 64
for width, blocks, stride in (64, 3, 1), (128, 8, 2), (256, 36, 2), (512, 3, 2):
    for block in range(blocks):
        layers.append(Bottleneck(channels, width, stride if block == 0 else 1))
        channels = 4 * width
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)).cuda()
assert sum(parameter.numel() for parameter in model.parameters()) == 60_192_808
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batch = int(os.environ["BATCH"])
for _ in range(2):
    with torch.autocast("cuda", dtype=torch.float16, enabled=os.environ.get("AMP") == "1"):
        target = torch.zeros(batch, dtype=torch.long, device="cuda")
        loss = nn.functional.cross_entropy(model(torch.empty(batch, 3, 224, 224, device="cuda")), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
