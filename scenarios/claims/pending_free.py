# Frees a tensor while another stream uses it. Its memory is not free until that work is done. With SYNCHRONIZE=1 the host waits first.
import os

import torch

side = torch.cuda.Stream()
x = torch.empty(600 << 20, dtype=torch.uint8, device="cuda")
with torch.cuda.stream(side):
    x.add_(1)
x.record_stream(side)
del x
if os.environ.get("SYNCHRONIZE") == "1":
    torch.cuda.synchronize()
y = torch.empty(600 << 20, dtype=torch.uint8, device="cuda")
