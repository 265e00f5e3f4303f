# a tensor and a model that another process uses by CUDA IPC, as Hogwild training does
import json
import torch
import torch.multiprocessing as mp


def child(received, answers):
    tensor, model = received.get(), received.get()
    tensor.add_(1)
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    answers.put({"shape": list(tensor.shape), "device": tensor.device.index, "reserved": torch.cuda.memory_reserved()})
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
    print(json.dumps({**answers.get(), "own": torch.cuda.memory_allocated()}), flush=True)
    process.join()
