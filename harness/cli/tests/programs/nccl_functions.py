# Communicators that lose, gain and share ranks, called through NCCL's C interface. The ranks are threads of one process.
import ctypes, json, threading
import torch

torch.cuda.init()
nccl = ctypes.CDLL("libnccl.so.2")
Id = ctypes.c_uint64 * 16
ids = [Id() for _ in range(2)]
nccl.ncclGetUniqueId(ids[0])
found, barrier = {}, threading.Barrier(4)


class ById(ctypes.Structure):
    _fields_ = [("words", Id)]


def checked(status):
    assert status == 0, status


def size_and_rank(communicator):
    size, rank = ctypes.c_int(), ctypes.c_int()
    checked(nccl.ncclCommCount(communicator, ctypes.byref(size)))
    checked(nccl.ncclCommUserRank(communicator, ctypes.byref(rank)))
    return [size.value, rank.value]


def gathered(communicator, number, ranks):
    data = torch.tensor([number] + [0] * ranks).cuda()
    checked(nccl.ncclAllGather(ctypes.c_void_p(data.data_ptr()), ctypes.c_void_p(data.data_ptr() + 8), ctypes.c_size_t(1), 4, communicator, None))
    return data.tolist()[1:]


def rank(number):
    whole, part, grown, error = (ctypes.c_void_p() for _ in range(4))
    if number < 3:
        checked(nccl.ncclCommInitRankConfig(ctypes.byref(whole), 3, ById(ids[0]), number, None))
        result = [gathered(whole, number, 3)]
        if number != 1:
            checked(nccl.ncclCommShrink(whole, (ctypes.c_int * 1)(1), 1, ctypes.byref(part), None, 0))
            result += [size_and_rank(part), gathered(part, 10 * number, 2)]
        if number == 0:
            checked(nccl.ncclCommGetUniqueId(whole, ids[1]))
    barrier.wait()
    if number < 3:
        checked(nccl.ncclCommGrow(whole, 4, ids[1] if number == 0 else None, -1, ctypes.byref(grown), None))
    else:
        result = []
        checked(nccl.ncclCommGrow(None, 4, ids[1], 3, ctypes.byref(grown), None))
    result += [size_and_rank(grown), gathered(grown, 100 + number, 4)]
    checked(nccl.ncclCommGetAsyncError(grown, ctypes.byref(error)))
    checked(nccl.ncclCommFinalize(grown))
    checked(nccl.ncclCommRevoke(grown, 0))
    checked(nccl.ncclCommDestroy(grown))
    found[number] = result


threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
memory = ctypes.c_void_p()
checked(nccl.ncclMemAlloc(ctypes.byref(memory), ctypes.c_size_t(4 << 20)))
free, total = torch.cuda.mem_get_info()
checked(nccl.ncclMemFree(memory))
print(json.dumps({"ranks": [found[number] for number in range(4)], "allocated": torch.cuda.mem_get_info()[0] - free >> 20}))
