"""Trains a model for three steps and writes snapshots of the last one: python categories.py MODEL FOLDER"""
import os
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../python"))
from harness import observe

name, folder = sys.argv[1:]
WIDTH, WORDS = 512, 20000


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = lambda: nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True, norm_first=True)
        self.words, self.layers, self.head = nn.Embedding(WORDS, WIDTH), nn.ModuleList(layer() for _ in range(6)), nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        hidden = self.words(words)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if name == "checkpointed" else layer(hidden)
        return self.head(hidden)


def stack(*layers):
    return nn.Sequential(*[layer for made in layers for layer in made])


def words():
    return torch.randint(WORDS, (4, 128), device="cuda")


def images():
    return torch.randn(8, 3, 64, 64, device="cuda")


def convolution(inputs):
    return nn.Conv2d(inputs, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()


optimizers = torch.optim
model, batch, optimizer = {
    "transformer": (Transformer, words, optimizers.AdamW),
    "transformer_bf16": (Transformer, words, lambda parameters: optimizers.AdamW(parameters, fused=True)),
    "checkpointed": (Transformer, words, lambda parameters: optimizers.Adam(parameters, foreach=False)),
    "convolutions": (lambda: stack(*map(convolution, (3, 64, 64, 64))), images, lambda parameters: optimizers.SGD(parameters, 0.1, momentum=0.9)),
    "lstm": (lambda: nn.LSTM(128, 512, 2), lambda: torch.randn(50, 16, 128, device="cuda"), lambda parameters: optimizers.RMSprop(parameters, centered=True)),
    "kept_gradients": (lambda: stack(*[(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)]), lambda: torch.randn(512, 1024, device="cuda"), optimizers.Adagrad),
}[name]

torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
model = model().cuda()
optimizer = optimizer(model.parameters())


def snapshot(moment):
    observe.dump(torch, os.path.join(folder, f"{name}-{moment}.pickle"))


for step in range(3):
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
