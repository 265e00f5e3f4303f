"""Operations that create handles, plans and modules of libraries, each twice, with `argv[1]` MiB left on the GPU: their errors."""
import ctypes, json, sys, torch

x = torch.ones(64, 64, device="cuda")
net = torch.nn.Conv2d(3, 8, 3).cuda()
picture = torch.ones(1, 3, 32, 32, device="cuda")
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


# The header of an ELF file with 3 MiB of machine code.
image = bytes([*b"\x7fELF", *bytes(36)]) + (3 << 20).to_bytes(8, "little") + bytes(16)


def load(library, function, *options):
    error = getattr(ctypes.CDLL(library), function)(ctypes.byref(ctypes.c_void_p()), image, *options)
    if error:
        raise RuntimeError("error %d" % error)


acts = {
    "product": lambda: x @ x,
    "half": lambda: x.half() @ x.half(),
    "bias": lambda: torch.nn.functional.linear(x.half(), x.half(), x[0].half()),
    "convolution": lambda: net(picture),
    "inverse": lambda: torch.linalg.inv_ex(x),
    "sparse": lambda: sparse @ x[:4],
    "fft": lambda: torch.fft.fft(x),
    "module": lambda: load("libcuda.so.1", "cuModuleLoadData"),
    "library": lambda: load("libcudart.so.13", "cudaLibraryLoadData", None, None, 0, None, None, 0),
    "pinned": lambda: torch.empty(4096, pin_memory=True),
}
print(json.dumps({name: [first_line(act), first_line(act)] for name, act in acts.items()}))
