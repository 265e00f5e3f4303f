# Each block is freed while another stream uses it, as by FSDP.
import torch

comm = torch.cuda.Stream()
for step in range(12):
    full = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    comm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(comm):
        full.add_(1)
    full.record_stream(comm)
    torch.cuda.current_stream().wait_stream(comm)
    del full
