# Draws random numbers, and trains models with them. An H200 with torch 2.11 had the expected numbers, except `empty`, `same layouts` and the gradients.
# These follow from the definition of the operations.
import json, torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

LARGE = 3_000_001


def drawn(draw):
    torch.manual_seed(1234)
    return draw().flatten()


def empty(count, dtype=torch.float32):
    return torch.empty(count, device="cuda", dtype=dtype)


def some(draw, places=(0, 255, 1023)):
    return [round(number, 3) for number in drawn(draw)[list(places)].tolist()]


def kept(draw):
    return "".join("01"[bool(number)] for number in drawn(draw)[:48].tolist())


def attention(backend, dtype):
    zeros = torch.zeros(2, 4, 64, 32, device="cuda", dtype=dtype)
    identity = torch.eye(64, 32, device="cuda", dtype=dtype).expand(2, 4, 64, 32).contiguous().requires_grad_()
    with sdpa_kernel(backend):
        weights = F.scaled_dot_product_attention(zeros, zeros, identity, dropout_p=0.3)
        weights.sum().backward()
    # The backward pass drops the same weights.
    assert torch.allclose(identity.grad[:, :, :32, 0].float(), weights.float().sum(2), atol=0.02)
    return weights


def flash_in_two_layouts():
    """Whether two operations of FlashAttention drop the same weights: one of sequences × heads × tokens, one of sequences × tokens × heads."""
    zeros = torch.zeros(2, 64, 4, 32, device="cuda", dtype=torch.bfloat16)
    ones = torch.ones_like(zeros)
    torch.manual_seed(1234)
    tokens_first = torch.ops.aten._flash_attention_forward(zeros, zeros, ones, None, None, 64, 64, 0.3, False, False)[0]
    torch.manual_seed(1234)
    heads_first = torch.ops.aten._scaled_dot_product_flash_attention(*(tensor.transpose(1, 2) for tensor in (zeros, zeros, ones)), 0.3)[0]
    return torch.equal(tokens_first.transpose(1, 2), heads_first)


def transformer(dropout):
    torch.manual_seed(0)
    with torch.device("cuda"):
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout, batch_first=True)
        body, words, head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Embedding(100, 64), nn.Linear(64, 100)
    optimizer = torch.optim.AdamW([*body.parameters(), *words.parameters(), *head.parameters()], 1e-3)
    for _ in range(20):
        x = torch.randint(0, 100, (8, 33), device="cuda")
        loss = F.cross_entropy(head(body(words(x[:, :-1]))).flatten(0, 1).float(), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return round(loss.item(), 4)


def autoencoder():
    torch.manual_seed(1)
    with torch.device("cuda"):
        encoder = nn.Sequential(nn.Linear(50, 64), nn.ReLU(), nn.Linear(64, 20))
        decoder = nn.Sequential(nn.Linear(10, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 50))
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 1e-3)
    for _ in range(30):
        x = torch.rand(64, 50, device="cuda")
        mean, logarithm = encoder(x).chunk(2, 1)
        sampled = mean + torch.randn_like(mean) * (logarithm / 2).exp()
        loss = F.mse_loss(decoder(sampled), x) - 1e-3 * (1 + logarithm - mean**2 - logarithm.exp()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return round(loss.item(), 4)


def tokens():
    torch.manual_seed(2)
    chances = F.softmax(torch.randn(4, 1000, device="cuda"), -1)
    return [torch.multinomial(chances, 1).flatten().tolist() for _ in range(20)][-1] + torch.randperm(50, device="cuda")[-4:].tolist()


found = {
    "uniform": some(lambda: empty(LARGE).uniform_(), (0, 255, 1_108_024, 2_233_024)),
    "normal": some(lambda: empty(LARGE).normal_(), (0, 255, 1_108_024, 2_233_024)),
    "double": some(lambda: empty(LARGE, torch.float64).normal_(), (0, 255, 1_108_024, 2_233_024)),
    "bfloat16": some(lambda: empty(1000, torch.bfloat16).uniform_(), (0, 255, 999)),
    "integers": some(lambda: torch.randint(0, 50257, (LARGE,), device="cuda"), (0, 255, 1_108_024, 2_233_024)),
    "long integers": some(lambda: torch.randint(0, 1 << 33, (LARGE,), device="cuda"), (0, 255, 1_108_024, 2_233_024)),
    "all integers": some(lambda: empty(1000, torch.int64).random_(-(1 << 63), None), (0, 255, 999)),
    "permutation": some(lambda: torch.randperm(1000, device="cuda"), (0, 255, 999)),
    "cauchy": some(lambda: empty(1000).cauchy_(), (0, 255, 999)),
    "geometric": some(lambda: empty(1000).geometric_(0.2), (0, 255, 999)),
    "dropout": kept(lambda: F.dropout(torch.ones(4096, device="cuda"), 0.5)),
    "bfloat16 dropout": kept(lambda: F.dropout(torch.ones(4096, device="cuda", dtype=torch.bfloat16), 0.5)),
    "double dropout": kept(lambda: F.dropout(torch.ones(1_081_344, device="cuda", dtype=torch.float64), 0.5)[541_024 : 541_024 + 48 * 270 : 270]),
    "scaled": drawn(lambda: F.dropout(torch.ones(4096, device="cuda", dtype=torch.float64), 0.1)).max().item(),
    "empty": [*drawn(lambda: empty(0).normal_()).shape, *drawn(lambda: F.dropout(empty(0))).shape, *drawn(lambda: torch.randperm(0, device="cuda")).shape],
    "bernoulli": kept(lambda: torch.bernoulli(torch.full((1000,), 0.3, device="cuda"))),
    "flash": kept(lambda: attention(SDPBackend.FLASH_ATTENTION, torch.bfloat16)),
    "same layouts": flash_in_two_layouts(),
    "efficient": kept(lambda: attention(SDPBackend.EFFICIENT_ATTENTION, torch.float32)),
    "losses": [transformer(0.0), transformer(0.1), autoencoder()],
    "tokens": tokens(),
}
# Two of these ten have equal keys.
torch.manual_seed(10)
found["shuffled"] = torch.randperm(10, device="cuda").tolist()
print(json.dumps(found))
