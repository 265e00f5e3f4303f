# a tensor and a model that another process uses by CUDA IPC, as Hogwild training does
import ctypes
import json
import torch
import torch.multiprocessing as mp


with open("/proc/self/maps") as maps:
    cudart = ctypes.CDLL(next(line.split()[-1] for line in maps if "/libcudart.so" in line))


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * 64)]


cudart.cudaIpcOpenMemHandle.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]


def child(received, answers):
    tensor, model = received.get(), received.get()
    tensor.add_(1)
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    opened = cudart.cudaIpcOpenMemHandle(ctypes.byref(ctypes.c_void_p()), received.get(), 1)
    answers.put({"opened": opened, "shape": list(tensor.shape), "device": tensor.device.index, "reserved": torch.cuda.memory_reserved()})
    del tensor, model


if __name__ == "__main__":
    mp.set_start_method("spawn")
    sent, answers = mp.Queue(), mp.Queue()
    model = torch.nn.Linear(64, 64).cuda().share_memory()
    tensor = torch.zeros(1 << 20, device="cuda")
    process = mp.Process(target=child, args=(sent, answers))
    process.start()
    sent.put(tensor)
    sent.put(model)
    # Less than a page of the device
    address, handle = ctypes.c_void_p(), Handle()
    cudart.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(1000))
    cudart.cudaIpcGetMemHandle(ctypes.byref(handle), address)
    sent.put(handle)
    print(json.dumps({**answers.get(), "own": torch.cuda.memory_allocated()}), flush=True)
    process.join()
