# Starts when a server has its model on the GPU. Its batch of 1 GiB does not fit, so it uses half of it until the server has ended.
import time

import torch


def wait_for(is_right):
    while not is_right(*torch.cuda.mem_get_info()):
        time.sleep(0.01)


def batch(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


wait_for(lambda free, total: total - free >= 1280 << 20)
try:
    held = batch(1 << 30)
except torch.OutOfMemoryError:
    held = batch(512 << 20)
wait_for(lambda free, total: free >= 1 << 30)
held = [held, batch(1 << 30)]
