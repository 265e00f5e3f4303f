# NCCL's own memory by --nccl-memory, through its C interface: at the first collective, at the first send, which fails, and after the end. Four ranks in one process.
import ctypes, json
import torch

torch.cuda.init()
nccl = ctypes.CDLL("libnccl.so.2")
nccl.ncclGetErrorString.restype = nccl.ncclGetLastError.restype = ctypes.c_char_p


def created(ranks):
    communicators = (ctypes.c_void_p * ranks)()
    assert nccl.ncclCommInitAll(communicators, ranks, None) == 0
    return ctypes.c_void_p(communicators[0])


data = torch.zeros(2, device="cuda")
address, two = ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(2)
all_free = torch.cuda.mem_get_info()[0]
used = lambda: (all_free - torch.cuda.mem_get_info()[0]) >> 20
reduce = lambda communicator: nccl.ncclAllReduce(address, address, two, 7, 0, communicator, None)
send = lambda communicator: nccl.ncclSend(address, two, 7, 0, communicator, None)
of_two, of_four = created(2), created(4)
found = {"created": used()}
found["reduce"] = [reduce(of_two), used(), reduce(of_two), used(), reduce(of_four), used()]
found["send"] = [send(of_two), used(), send(of_four), used()]
found["errors"] = [nccl.ncclGetErrorString(1).decode(), nccl.ncclGetLastError(None).decode()]
found["destroyed"] = [nccl.ncclCommAbort(communicator) for communicator in (of_two, of_four)] + [used()]
print(json.dumps(found))
