# A training with strided, grouped, pointwise and channels-last convolutions of several types.
import json, torch
from torch import nn
net = nn.Sequential(nn.Conv2d(3, 32, 7, 2, 3), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=2, dilation=2, groups=2), nn.Conv2d(64, 16, 1)).cuda()
for kind, layout in [(torch.float32, torch.contiguous_format), (torch.bfloat16, torch.channels_last), (torch.float16, torch.contiguous_format)]:
    images = torch.empty(4, 3, 64, 64, device="cuda", dtype=kind).contiguous(memory_format=layout)
    net.to(dtype=kind, memory_format=layout)(images).sum().backward()
    net.zero_grad()
nn.Conv1d(8, 8, 5).cuda()(torch.empty(2, 8, 100, device="cuda"))
print(json.dumps({"ended": True}))
