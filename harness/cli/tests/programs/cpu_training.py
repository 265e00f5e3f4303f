# Trains models on the CPU and on the GPU. With `--values cpu`, the losses are the same.
import copy, json, torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
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
        self.body, self.gates, self.head = nn.LSTM(12, 16, 2, batch_first=True, bidirectional=True), nn.GRU(32, 16), nn.Linear(8, 5)
        self.projected = nn.LSTM(16, 16, proj_size=8, bias=False)

    def forward(self, x):
        return self.head(self.projected(self.gates(self.body(x)[0])[0])[0].mean(1))


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
# Autocast passes the matrices of recurrent networks as vectors.
data = torch.randn(5, 3, 12)
for kind in (nn.RNN, nn.GRU, nn.LSTM):
    here = kind(12, 16, 2)
    there = copy.deepcopy(here).cuda()
    with torch.autocast("cuda"):
        output = there(data.cuda())[0]
    here(data)[0].mean().backward(), output.float().mean().backward()
    first, second = here.weight_ih_l0.grad, there.weight_ih_l0.grad.cpu()
    same[f"{kind.__name__} autocast"] = torch.allclose(output.float().cpu(), here(data)[0], atol=0.01) and torch.allclose(first, second, atol=1e-3) and bool(second.any())
# The same random numbers when the state of the generator is restored, as checkpointing does.
state = torch.cuda.get_rng_state()
first = F.dropout(torch.ones(1000, device="cuda"))
torch.cuda.set_rng_state(state)
same["dropout"] = bool((first == F.dropout(torch.ones(1000, device="cuda"))).all()) and 0 < first.count_nonzero().item() < 1000
# Without biases and with a single step, the output is linear in the weights of the last layer, so the gradient has the mask of the forward pass.
network = nn.RNN(12, 16, 2, nonlinearity="relu", bias=False, dropout=0.5).cuda()
data = torch.ones(1, 30, 12, device="cuda")
output, other = network(data)[0], network(data)[0]
output.sum().backward()
is_linear_in_weights = torch.allclose(output.sum(), (network.weight_ih_l1 * network.weight_ih_l1.grad).sum(), rtol=1e-4)
same["recurrent dropout"] = is_linear_in_weights and not torch.allclose(output, other) and not torch.allclose(output, network.eval()(data)[0])
# With dropout, the output is linear in the values, so the gradient has the mask of the forward pass if both sums are equal.
halves = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
library, library_backward = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward


def is_linear(output, gradient, value, of_value):
    sums = (output.float() * gradient.float()).sum(), (value.float() * of_value.float()).sum()
    return torch.allclose(*sums, rtol=0.03, atol=1.0)


for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
    query, key, value = halves(2, 4, 32, 64), halves(2, 4, 32, 64), halves(2, 4, 32, 64)
    with sdpa_kernel(backend):
        output = F.scaled_dot_product_attention(query, key, value, dropout_p=0.3)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    same[f"{backend.name} dropout"] = is_linear(output, gradient, value, value.grad)
ends = torch.tensor([0, 10, 32], device="cuda", dtype=torch.int32)
query, key, value = (halves(32, 4, 64).detach() for _ in range(3))
for dropout in (0.0, 0.3):
    output, sums, seed, offset, _ = library(query, key, value, ends, ends, 22, 22, dropout, True, False)
    gradient = torch.randn_like(output)
    gradients = library_backward(gradient, query, key, value, output, sums, ends, ends, 22, 22, dropout, True, seed, offset)
    same[f"sequences {dropout}"] = is_linear(output, gradient, value, gradients[2])
    if not dropout:
        parts = [tensor.cpu().float().split([10, 22]) for tensor in (query, key, value)]
        expected = [F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in group), is_causal=True).transpose(0, 1) for group in zip(*parts)]
        same["sequences"] = torch.allclose(output.cpu().float(), torch.cat(expected), atol=0.03)
sequences = [torch.randn(length, 32, device="cuda", requires_grad=True) for length in (5, 9, 3)]
heads = lambda tensor: tensor.unflatten(-1, [4, 8]).transpose(1, 2)
nested = heads(torch.nested.as_nested_tensor(sequences, layout=torch.jagged))
outputs = F.scaled_dot_product_attention(nested, nested, nested, is_causal=True).transpose(1, 2).flatten(2).values()
outputs.square().sum().backward()
leaves = [tensor.detach().cpu().requires_grad_() for tensor in sequences]
expected = torch.cat([F.scaled_dot_product_attention(*[heads(leaf[None])] * 3, is_causal=True).transpose(1, 2).flatten(2)[0] for leaf in leaves])
expected.square().sum().backward()
gradients = zip(sequences, leaves)
same["nested"] = torch.allclose(outputs.cpu(), expected, atol=1e-5) and all(torch.allclose(own.grad.cpu(), leaf.grad, atol=1e-4) for own, leaf in gradients)
scores, labels, lengths = torch.randn(20, 3, 7).log_softmax(-1), torch.randint(1, 7, (12,), dtype=torch.int32), ([20] * 3, [4] * 3)
found = []
for device in ("cpu", "cuda"):  # On the GPU, cuDNN computes the loss, because the labels are integers of 32 bits of the CPU.
    leaf = scores.detach().to(device).requires_grad_()
    loss = F.ctc_loss(leaf, labels, *lengths)
    loss.backward()
    found.append((loss.item(), leaf.grad.cpu()))
same["ctc"] = abs(found[0][0] - found[1][0]) < 1e-4 and torch.allclose(found[0][1], found[1][1], atol=1e-5)
if hasattr(torch.ops.aten.mm, "dtype"):
    product, into = torch.mm(query[0], key[0].T, out_dtype=torch.float32), torch.empty(4, 4, device="cuda")
    torch.mm(query[0], key[0].T, out_dtype=torch.float32, out=into)
    expected = query[0].cpu().float() @ key[0].cpu().float().T
    same["product"] = torch.allclose(product.cpu(), expected) and torch.allclose(into.cpu(), expected)
else:
    same["product"] = True
print(json.dumps({"different": [name for name, is_same in same.items() if not is_same], "same": sum(same.values())}))
