# A rank adds tensors on another rank's GPU through torch.distributed.rpc.
import json, os, socket
import torch
import torch.distributed.rpc as rpc


def add(a, b):
    return a + b


def main(rank):
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=2)
    if rank == 0:
        options.set_device_map("1", {0: 1})
    rpc.init_rpc(str(rank), rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        ones = torch.ones(4, device="cuda:0")
        result = rpc.rpc_sync("1", add, args=(ones, ones))
        print(json.dumps({"sum": result.tolist(), "device": str(result.device)}))
    rpc.shutdown()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free.getsockname()[1])
    torch.multiprocessing.spawn(main, nprocs=2)
