"""Operations that create handles and plans of libraries, each twice, with `argv[1]` MiB left on the GPU: their errors."""
import json, sys, torch

x = torch.ones(64, 64, device="cuda")
net = torch.nn.Conv2d(3, 8, 3).cuda()
image = torch.ones(1, 3, 32, 32, device="cuda")
sparse = torch.ones(4, 4).to_sparse_csr().cuda()
torch.zeros(1 << 22, device="cuda")
if len(sys.argv) > 1:
    free, _ = torch.cuda.mem_get_info()
    rest = torch.empty(free - (int(sys.argv[1]) << 20), dtype=torch.uint8, device="cuda")


def first_line(act):
    try:
        act()
        return "ok"
    except (RuntimeError, torch.OutOfMemoryError) as error:
        return str(error).splitlines()[0][:90]


acts = {
    "product": lambda: x @ x,
    "half": lambda: x.half() @ x.half(),
    "bias": lambda: torch.nn.functional.linear(x.half(), x.half(), x[0].half()),
    "convolution": lambda: net(image),
    "inverse": lambda: torch.linalg.inv_ex(x),
    "sparse": lambda: sparse @ x[:4],
    "fft": lambda: torch.fft.fft(x),
    "pinned": lambda: torch.empty(4096, pin_memory=True),
}
print(json.dumps({name: [first_line(act), first_line(act)] for name, act in acts.items()}))
