"""Trains each model for three steps in a process of its own, and writes snapshots of the last step: python categories.py FOLDER MODEL…"""
import os
import sys

import torch
import torch._dynamo  # The optimizers import it.
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../python"))
from harness import observe

folder = sys.argv[1]
WIDTH, WORDS = 512, 20000


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = lambda: nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True, norm_first=True)
        self.words, self.layers, self.head = nn.Embedding(WORDS, WIDTH), nn.ModuleList(layer() for _ in range(6)), nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        hidden = self.words(words)
        for layer in self.layers:
            hidden = self.layer(layer, hidden)
        return self.head(hidden)

    def layer(self, layer, hidden):
        return layer(hidden)


class Checkpointed(Transformer):
    def layer(self, layer, hidden):
        return checkpoint(layer, hidden, use_reentrant=False)


def stack(*layers):
    return nn.Sequential(*[layer for made in layers for layer in made])


def words():
    return torch.randint(WORDS, (4, 128), device="cuda")


def images():
    return torch.randn(8, 3, 64, 64, device="cuda")


def convolution(inputs):
    return nn.Conv2d(inputs, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()


optimizers = torch.optim
MODELS = {
    "transformer": (Transformer, words, optimizers.AdamW),
    "transformer_bf16": (Transformer, words, lambda parameters: optimizers.AdamW(parameters, fused=True)),
    "checkpointed": (Checkpointed, words, lambda parameters: optimizers.Adam(parameters, foreach=False)),
    "convolutions": (lambda: stack(*map(convolution, (3, 64, 64, 64))), images, lambda parameters: optimizers.SGD(parameters, 0.1, momentum=0.9)),
    "lstm": (lambda: nn.LSTM(128, 512, 2), lambda: torch.randn(50, 16, 128, device="cuda"), lambda parameters: optimizers.RMSprop(parameters, centered=True)),
    "kept_gradients": (lambda: stack(*[(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)]), lambda: torch.randn(512, 1024, device="cuda"), optimizers.Adagrad),
}


def train(name):
    model, batch, optimizer = MODELS[name]
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    model = model().cuda()
    optimizer = optimizer(model.parameters())

    def snapshot(moment):
        observe.dump(torch, os.path.join(folder, f"{name}-{moment}.pickle"))

    for _ in range(3):
        inputs = batch()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=name.endswith("bf16")):
            result = model(inputs)
            loss = (result[0] if name == "lstm" else result).float().square().mean()
        snapshot("forward")
        loss.backward()
        snapshot("backward")
        optimizer.step()
        snapshot("step")
        optimizer.zero_grad(set_to_none=name != "kept_gradients")
        snapshot("zero_grad")


for name in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        train(name)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(f"{name} failed")
