# processes that are forked after the GPU was used, and page-locked memory
import json, subprocess, torch
torch.ones(4, device="cuda")
data = torch.utils.data.TensorDataset(torch.arange(64))
loader = torch.utils.data.DataLoader(data, 16, num_workers=2, pin_memory=True, multiprocessing_context="fork")
batches = [batch for (batch,) in loader]
back = torch.cat([batch.cuda(non_blocking=True).cpu() for batch in batches])
print(json.dumps({"pinned": all(batch.is_pinned() for batch in batches), "back": int(back.sum()), "child": subprocess.run(["true"]).returncode}))
