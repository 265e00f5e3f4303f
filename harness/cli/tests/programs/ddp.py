# One rank trains with DistributedDataParallel, whose ranks compare their parameters first.
import json, torch
torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 1024).cuda())
for _ in range(2):
    model(torch.ones(64, 1024, device="cuda")).sum().backward()
torch.distributed.destroy_process_group()
print(json.dumps({"gradients": sum(parameter.grad is not None for parameter in model.parameters())}))
