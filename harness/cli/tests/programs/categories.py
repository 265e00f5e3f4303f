"""Trains each model for three steps in a process of its own, and writes snapshots of the last step: python categories.py FOLDER MODEL…

The recording of a model whose name begins with `late` starts after the first step. A name that ends with `cpp` records frames of C++.
"""
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


class Own(nn.Module):
    """Allocates its parameter and its buffer itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device="cuda").normal_())
        self.register_buffer("mask", torch.ones(WIDTH, device="cuda"))

    def forward(self, inputs):
        return torch.relu(inputs @ self.weight.t()) * self.mask


class OwnLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Own() for _ in range(6)])

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


class Memory:
    """Belongs to no module, although its file has modules."""

    def __init__(self):
        self.states = torch.zeros(1024, WIDTH, device="cuda")


class Agent:
    def __init__(self):
        self.memory = Memory()


class Adapters(nn.Module):
    """Layers without gradients, and small ones with."""

    def __init__(self):
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)).requires_grad_(False)
        self.down, self.up = (nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(6)) for sizes in ((WIDTH, 8), (8, WIDTH)))

    def forward(self, inputs):
        for base, down, up in zip(self.base, self.down, self.up):
            inputs = torch.tanh(base(inputs) + up(down(inputs)))
        return inputs


class OwnAdam(torch.optim.Optimizer):
    """Replaces its state in each step."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state, gradient = self.state[parameter], parameter.grad
            state["mean"] = 0.9 * state.get("mean", torch.zeros_like(gradient)) + 0.1 * gradient
            state["square"] = 0.99 * state.get("square", torch.zeros_like(gradient)) + 0.01 * gradient**2
            parameter.data -= 0.001 * state["mean"] / (torch.sqrt(state["square"]) + 1e-8)


def words():
    return torch.randint(WORDS, (4, 128), device="cuda")


def vectors():
    return torch.randn(64, WIDTH, device="cuda")


def images():
    return torch.randn(8, 3, 64, 64, device="cuda")


def convolution(inputs):
    return nn.Conv2d(inputs, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()


def perceptron():
    return stack(*[(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(6)])


optimizers = torch.optim
MODELS = {
    "transformer": (Transformer, words, optimizers.AdamW),
    "transformer_bf16": (Transformer, words, lambda parameters: optimizers.AdamW(parameters, fused=True)),
    "checkpointed": (Checkpointed, words, lambda parameters: optimizers.Adam(parameters, foreach=False)),
    "convolutions": (lambda: stack(*map(convolution, (3, 64, 64, 64))), images, lambda parameters: optimizers.SGD(parameters, 0.1, momentum=0.9)),
    "lstm": (lambda: nn.LSTM(128, 512, 2), lambda: torch.randn(50, 16, 128, device="cuda"), lambda parameters: optimizers.RMSprop(parameters, centered=True)),
    "kept_gradients": (lambda: stack(*[(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)]), lambda: torch.randn(512, 1024, device="cuda"), optimizers.Adagrad),
    "own": (OwnLayers, vectors, OwnAdam),
    "own_cpp": (OwnLayers, vectors, OwnAdam),
    "accumulated": (perceptron, vectors, optimizers.AdamW),
    "adapters": (Adapters, vectors, optimizers.AdamW),
    "averaged": (perceptron, vectors, lambda parameters: optimizers.Adam(parameters, amsgrad=True)),
    "hooks": (perceptron, vectors, optimizers.NAdam),
    "parallel": (perceptron, vectors, optimizers.AdamW),
    "late": (perceptron, vectors, optimizers.AdamW),
    "late_cpp": (perceptron, vectors, lambda parameters: optimizers.SGD(parameters, 0.1, momentum=0.9)),
}


def train(name):
    model, batch, optimizer = MODELS[name]
    stacks = "all" if name.endswith("cpp") else "python"
    record = lambda: torch.cuda.memory._record_memory_history(context="alloc", stacks=stacks)
    # The observer records as soon as CUDA starts.
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(enabled=None) if name.startswith("late") else record()
    model = model().cuda()
    agent = Agent() if name == "own" else None
    if name == "parallel":
        torch.distributed.init_process_group("nccl", init_method=f"file://{folder}/{name}", rank=0, world_size=1)
        model = nn.parallel.DistributedDataParallel(model, device_ids=[0])
    average = [parameter.detach().clone() for parameter in model.parameters()] if name == "averaged" else []
    if name == "hooks":
        [parameter.register_hook(lambda gradient: 0.5 * gradient) for parameter in model.parameters()]
    optimizer = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    scaler = torch.amp.GradScaler("cuda", enabled=name == "accumulated")

    def snapshot(moment):
        observe.dump(torch, os.path.join(folder, f"{name}-{moment}.pickle"))

    for step in range(3):
        if name.startswith("late") and step == 1:
            record()
        for _ in range(2 if name == "accumulated" else 1):
            inputs = batch()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=name in ("transformer_bf16", "accumulated")):
                result = model(inputs)
                loss = (result[0] if name == "lstm" else result).float().square().mean()
            snapshot("forward")
            scaler.scale(loss).backward()
        if name == "accumulated":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        snapshot("backward")
        scaler.step(optimizer)
        scaler.update()
        [mean.lerp_(parameter.detach(), 0.1) for mean, parameter in zip(average, model.parameters())]
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
