# Trains models on the CPU and on the GPU. With `--values cpu`, the losses are the same.
import copy, json, torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Convolutions(nn.Module):
    shape = (8, 3, 16, 16)

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.ConvTranspose2d(8, 4, 2, 2), nn.GroupNorm(2, 4))
        self.head = nn.Linear(4 * 14 * 14, 5)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


class Recurrent(nn.Module):
    shape = (6, 10, 12)

    def __init__(self):
        super().__init__()
        self.body, self.gates, self.head = nn.LSTM(12, 16, 2, batch_first=True, bidirectional=True), nn.GRU(32, 16), nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.gates(self.body(x)[0])[0].mean(1))


class Cells(nn.Module):
    shape = (6, 10, 12)

    def __init__(self):
        super().__init__()
        self.memory, self.gates, self.head = nn.LSTMCell(12, 16), nn.GRUCell(16, 16, bias=False), nn.Linear(16, 5)

    def forward(self, x):
        state, hidden = None, x.new_zeros(len(x), 16)
        for step in x.unbind(1):
            state = self.memory(step, state)
            hidden = self.gates(state[0], hidden)
        return self.head(hidden + state[1])


class Attention(nn.Module):
    shape = (4, 20)

    def __init__(self):
        super().__init__()
        self.words, self.norm, self.qkv, self.head = nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 5)
        self.last = nn.RMSNorm(32)

    def block(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, x):
        x = self.words(x.abs().mul(20).long() % 50)
        return self.head(self.last(self.block(checkpoint(self.block, x, use_reentrant=False))).mean(1))


def losses(model, optimizer, data, device):
    model, data = copy.deepcopy(model).to(device), data.to(device)
    labels = torch.arange(len(data), device=device) % 5
    optimizer = optimizer(model.parameters())
    found = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


torch.manual_seed(0)
optimizers = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
}
same = {}
for kind in (Convolutions, Recurrent, Cells, Attention):
    model, data = kind(), torch.randn(*kind.shape)
    for name, optimizer in optimizers.items():
        here, there = (losses(model, optimizer, data, device) for device in ("cpu", "cuda"))
        same[f"{kind.__name__} {name}"] = here[-1] < here[0] and torch.allclose(torch.tensor(here), torch.tensor(there), rtol=1e-3)
# The same random numbers when the state of the generator is restored, as checkpointing does.
state = torch.cuda.get_rng_state()
first = F.dropout(torch.ones(1000, device="cuda"))
torch.cuda.set_rng_state(state)
same["dropout"] = bool((first == F.dropout(torch.ones(1000, device="cuda"))).all()) and 0 < first.count_nonzero().item() < 1000
print(json.dumps({"different": [name for name, is_same in same.items() if not is_same], "same": sum(same.values())}))
