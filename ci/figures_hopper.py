"""A program whose memory was recorded on an NVIDIA H100 or H200: python ci/figures_hopper.py NAME

Prints the peaks of allocated and reserved bytes, the number of allocations, and a checksum of their sizes in order. With `seconds cpu` or `seconds cuda`
after the name, it prints the least processor's time of three runs of the program on that device, after a first one.
"""
import os
import random
import sys
import time

import record
import torch
import torch.nn.functional as F
from torch import nn

BF16, FP16 = torch.bfloat16, torch.float16
PROGRAMS = {}
DEVICE = "cuda"


def program(run):
    PROGRAMS[run.__name__] = run


def normal(*shape, dtype=None):
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def integers(limit, *shape):
    return torch.randint(limit, shape, device=DEVICE)


def train(model, loss, steps=2, optimizer=None, amp=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(steps):
        with torch.autocast(DEVICE, dtype=amp, enabled=amp is not None):
            result = loss()
        result.backward()
        optimizer.step()
        optimizer.zero_grad()


def classify(model, batch=8, side=224, channels_last=False, amp=None):
    layout = torch.channels_last if channels_last else torch.preserve_format
    model = model.cuda().to(memory_format=layout)
    images = normal(batch, 3, side, side)
    if channels_last:
        images = images.contiguous(memory_format=layout)
    labels = integers(1000, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train(model, lambda: F.cross_entropy(model(images), labels), optimizer=optimizer, amp=amp)


def vision(label, name=None, **options):
    def run():
        import torchvision

        classify(getattr(torchvision.models, name or label)(weights=None), **options)

    PROGRAMS[label] = run


def timm_model(name, **options):
    def run():
        import timm

        classify(timm.create_model(name, pretrained=False), **{"batch": 4, **options})

    PROGRAMS[name] = run


def language_model(label, model, batch=4, length=128, steps=2, amp=None, dtype=None, checkpoint=False, before=None, **config):
    def run():
        import transformers

        if before:
            torch.cuda.memory._set_allocator_settings(before)
        settings = getattr(transformers, model.split("For")[0].removesuffix("LMHeadModel") + "Config")(**config)
        module = getattr(transformers, model)(settings).cuda().to(dtype).train()
        if checkpoint:
            module.gradient_checkpointing_enable()
        tokens = integers(settings.vocab_size, batch, length)
        extra = {"decoder_input_ids": tokens} if settings.is_encoder_decoder else {}
        train(module, lambda: module(input_ids=tokens, labels=tokens, **extra).loss, steps, amp=amp)

    PROGRAMS[label] = run


vision("resnet18")
vision("resnet50")
vision("resnet50_channels_last", "resnet50", channels_last=True)
vision("resnet50_channels_last_bf16", "resnet50", channels_last=True, amp=BF16, batch=32)
vision("resnet50_fp16", "resnet50", amp=FP16)
vision("vgg16", batch=4)
vision("densenet121", batch=4)
vision("mobilenet_v3_large")
vision("efficientnet_b0")
vision("convnext_tiny", batch=4)
vision("swin_t", batch=4)
vision("vit_b_16", batch=4)
vision("regnet_y_400mf")
vision("resnext50_32x4d", batch=4)
for name in ("resnetv2_50", "efficientnetv2_rw_t", "repvgg_a2", "mobilevit_s", "ghostnet_100", "xception41", "levit_128", "deit_tiny_patch16_224", "dpn68"):
    timm_model(name)
for name in ("nfnet_l0", "darknet53", "vovnet39a", "hrnet_w18_small"):
    timm_model(name, amp=BF16)
timm_model("inception_v3", side=299)

GPT = {"n_layer": 6, "n_embd": 512, "n_head": 8, "vocab_size": 50257}
LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
language_model("gpt2", "GPT2LMHeadModel", **GPT)
language_model("gpt2_bf16", "GPT2LMHeadModel", amp=BF16, batch=8, length=256, **GPT)
language_model("gpt2_fp16", "GPT2LMHeadModel", amp=FP16, **GPT)
language_model("gpt2_eager", "GPT2LMHeadModel", attn_implementation="eager", **GPT)
language_model("gpt2_expandable", "GPT2LMHeadModel", before="expandable_segments:True", **GPT)
language_model("bert", "BertForMaskedLM", num_hidden_layers=4, hidden_size=512, num_attention_heads=8, intermediate_size=2048)
language_model("llama", "LlamaForCausalLM", dtype=BF16, **LLAMA)
language_model("llama_checkpointed", "LlamaForCausalLM", dtype=BF16, checkpoint=True, batch=2, length=512, **LLAMA)
language_model(
    "mixtral",
    "MixtralForCausalLM",
    dtype=BF16,
    batch=2,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_local_experts=4,
    vocab_size=32000,
)
language_model("t5", "T5ForConditionalGeneration", d_model=512, num_layers=3, decoder_start_token_id=0)
language_model("mamba", "MambaForCausalLM", batch=1, length=32, steps=1, hidden_size=256, num_hidden_layers=2, vocab_size=5000)
language_model(
    "qwen3",
    "Qwen3ForCausalLM",
    dtype=BF16,
    batch=1,
    length=256,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=True,
)


def block(inputs, outputs):
    layers = (nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU())
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.large, self.middle, self.small = block(3, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up_to_middle, self.merge_middle = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), block(4 * width, 2 * width)
        self.up_to_large, self.merge_large = nn.ConvTranspose2d(2 * width, width, 2, 2), block(2 * width, width)
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, image):
        large = self.large(image)
        middle = self.middle(F.max_pool2d(large, 2))
        small = self.small(F.max_pool2d(middle, 2))
        middle = self.merge_middle(torch.cat([self.up_to_middle(small), middle], 1))
        large = self.merge_large(torch.cat([self.up_to_large(middle), large], 1))
        return self.out(large)


@program
def unet():
    model, images, labels = UNet().cuda(), normal(2, 3, 256, 256), integers(2, 2, 256, 256)
    train(model, lambda: F.cross_entropy(model(images), labels))


@program
def video():
    import torchvision

    model, clips = torchvision.models.video.r3d_18(weights=None).cuda(), normal(2, 3, 8, 112, 112)
    train(model, lambda: model(clips).square().mean())


@program
def segmentation():
    import torchvision

    model = torchvision.models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21).cuda()
    images, labels = normal(4, 3, 256, 256), integers(21, 4, 256, 256)
    train(model, lambda: F.cross_entropy(model(images)["out"], labels))


@program
def convolution_benchmark():
    import torchvision

    torch.backends.cudnn.benchmark = True
    classify(torchvision.models.resnet18(weights=None), batch=16)


@program
def attention():
    for is_masked in (False, True):
        for dtype in (torch.float32, BF16, FP16):
            for shape in ((2, 8, 512, 64), (1, 4, 1000, 128), (2, 4, 300, 40), (1, 8, 2048, 256)):
                query = normal(*shape, dtype=dtype).requires_grad_()
                key = torch.randn_like(query, requires_grad=True)
                value = torch.randn_like(query, requires_grad=True)
                mask = (lambda: torch.ones(shape[2], shape[2], device="cuda", dtype=torch.bool)) if is_masked else lambda: None
                F.scaled_dot_product_attention(query, key, value, is_causal=not is_masked, attn_mask=mask()).sum().backward()


@program
def recurrent():
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        model, inputs = kind(128, 256, 2, batch_first=True, dropout=0.1, bidirectional=True).cuda(), normal(16, 50, 128)
        train(model, lambda: model(inputs)[0].square().mean())


def optimize(optimizer, model, inputs, steps):
    def closure():
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


@program
def optimizers():
    makers = (
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True),
        lambda parameters: torch.optim.Adam(parameters, fused=True),
        lambda parameters: torch.optim.Adam(parameters, foreach=False),
        lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
        torch.optim.Adagrad,
        lambda parameters: torch.optim.RMSprop(parameters, centered=True),
        torch.optim.Adafactor,
        lambda parameters: torch.optim.LBFGS(parameters, max_iter=4),
    )
    for make in makers:
        model = nn.Sequential(nn.Linear(1000, 2000), nn.Tanh(), nn.Linear(2000, 300)).cuda()
        inputs = normal(64, 1000)
        optimizer = make(model.parameters())
        optimize(optimizer, model, inputs, 2)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@program
def products():
    for dtype in (torch.float32, FP16, BF16, torch.float64):
        for size in (64, 512, 1024, 4096):
            matrix = normal(size, size, dtype=dtype)
            matrix @ matrix
            matrix @ matrix[0]
            torch.bmm(matrix.view(8, size // 8, size), matrix.view(8, size, size // 8))
            torch.addmm(matrix, matrix, matrix.T)
            F.linear(matrix, matrix, matrix[0])
            torch.dot(matrix[0], matrix[0])
    bytes = torch.randint(-5, 5, (512, 512), device="cuda", dtype=torch.int8)
    torch._int_mm(bytes, bytes)
    eighths = normal(512, 512).to(torch.float8_e4m3fn)
    scale = torch.ones((), device="cuda")
    torch._scaled_mm(eighths, eighths.t(), scale_a=scale, scale_b=scale, out_dtype=BF16)


@program
def streams():
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    kept = []
    for turn in range(20):
        with torch.cuda.stream(first):
            made = normal(1 << 20)
            doubled = made * 2
        with torch.cuda.stream(second):
            second.wait_stream(first)
            result = doubled + 1
            doubled.record_stream(second)
            product = normal(256, 256) @ normal(256, 256)  # noqa: F841 (stays allocated until the next turn)
        del made, doubled
        if turn % 3 == 0:
            kept.append(result)
        torch.cuda.synchronize()


@program
def graphs():
    model, inputs = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).cuda(), normal(64, 512)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(inputs).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
    for _ in range(3):
        graph.replay()
    callables = torch.cuda.make_graphed_callables(model, (inputs,))
    callables(inputs).sum().backward()


@program
def compiled():
    model, inputs = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 512)).cuda(), normal(64, 512)
    fast = torch.compile(model)
    train(model, lambda: fast(inputs).square().mean(), 3)


@program
def checkpointing():
    from torch.utils.checkpoint import checkpoint

    layers = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Dropout(0.1), nn.Linear(4096, 1024)) for _ in range(6)]
    layers = nn.ModuleList(layers).cuda()

    def loss():
        hidden = normal(256, 1024)
        for layer in layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return hidden.square().mean()

    train(layers, loss)


@program
def grad_scaler():
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cuda")
    for _ in range(3):
        with torch.autocast("cuda", FP16):
            loss = model(normal(64, 512)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@program
def lora():
    import peft
    import transformers

    config = {**LLAMA, "num_key_value_heads": 16}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).to("cuda", BF16)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    tokens = integers(32000, 2, 256)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    train(model, lambda: model(input_ids=tokens, labels=tokens).loss, optimizer=torch.optim.AdamW(trained))


@program
def varying_lengths():
    import transformers

    lengths = random.Random(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(12):
        tokens = integers(50257, lengths.choice([2, 4, 8]), lengths.randrange(40, 400))
        train(model, lambda: model(input_ids=tokens, labels=tokens).loss, 1, optimizer)


@program
def key_value_caches():
    choice, live = random.Random(2), []
    for _ in range(3000):
        if live and (len(live) > 40 or choice.random() < 0.45):
            live.pop(choice.randrange(len(live)))
        else:
            live.append([torch.empty(choice.randrange(1, 600), 2, 8, 128, dtype=FP16, device="cuda") for _ in range(4)])


def fragmentation(label, settings=""):
    def run():
        if settings:
            torch.cuda.memory._set_allocator_settings(settings)
        choice, kept = random.Random(0), []
        for turn in range(2000):
            size = choice.choice([1000, 100_000, 1_500_000, 8_000_000, 30_000_000]) + choice.randrange(5000)
            kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            if len(kept) > 60:
                kept.pop(choice.randrange(len(kept)))
            if turn % 500 == 499:
                torch.cuda.empty_cache()

    PROGRAMS[label] = run


fragmentation("fragmentation")
fragmentation("fragmentation_expandable", "expandable_segments:True")
fragmentation("fragmentation_split", "max_split_size_mb:64,garbage_collection_threshold:0.6")
fragmentation("fragmentation_roundup", "roundup_power2_divisions:4")


@program
def halving():
    torch.cuda.set_per_process_memory_fraction(2 * 2**30 / torch.cuda.mem_get_info()[1])
    batch, done = 1 << 20, False
    while not done:
        try:
            weights = torch.zeros(1024, 1024, device="cuda")
            inputs = normal(batch, 1024)
            product = inputs @ weights  # noqa: F841 (both stay allocated while the next attempt begins)
            done = True
        except torch.cuda.OutOfMemoryError:
            batch //= 2


@program
def whole_gpu():
    kept = []
    try:
        while True:
            kept.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
            kept.append(torch.empty(700_000, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError:
        pass


@program
def gaussian_process():
    import gpytorch

    class Exact(gpytorch.models.ExactGP):
        def __init__(self, inputs, targets, likelihood):
            super().__init__(inputs, targets, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.covariance = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, inputs):
            return gpytorch.distributions.MultivariateNormal(self.mean(inputs), self.covariance(inputs))

    inputs = torch.rand(800, 4).cuda()
    targets = torch.sin(inputs.sum(1) * 6)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().cuda()
    model = Exact(inputs, targets, likelihood).cuda()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with gpytorch.settings.max_cholesky_size(2000):
        for _ in range(3):
            optimizer.zero_grad()
            loss = -objective(model(inputs), targets)
            loss.backward()
            optimizer.step()


@program
def graph_network():
    from torch_geometric.nn import BatchNorm, GATConv, GINConv, SAGEConv, global_mean_pool

    nodes, edges, generator = 5000, 40000, torch.Generator().manual_seed(0)
    features, links = torch.randn(nodes, 64, generator=generator).cuda(), torch.randint(nodes, (2, edges), generator=generator).cuda()
    graphs = torch.arange(nodes).div(100, rounding_mode="floor").cuda()

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.sample = GATConv(64, 32, heads=4), SAGEConv(128, 64)
            self.isomorphism = GINConv(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
            self.norm, self.out = BatchNorm(64), nn.Linear(64, 7)

        def forward(self):
            hidden = F.relu(self.sample(F.elu(self.attention(features, links)), links))
            return self.out(global_mean_pool(self.norm(self.isomorphism(hidden, links)), graphs))

    model, labels = Network().cuda(), torch.randint(7, (50,), generator=generator).cuda()
    train(model, lambda: F.cross_entropy(model(), labels), 3)


@program
def differential_equation():
    from torchdiffeq import odeint, odeint_adjoint

    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).cuda()

        def forward(self, time, state):
            return self.net(state)

    model, start, times = Field(), torch.randn(256, 32).cuda(), torch.linspace(0, 1, 5).cuda()
    train(model, lambda: odeint(model, start, times, method="rk4")[-1].square().mean(), 2)
    train(model, lambda: odeint_adjoint(model, start, times, method="rk4")[-1].square().mean(), 1)


@program
def equivariant():
    from e3nn import o3

    features, harmonics = o3.Irreps("16x0e+16x1o+8x2e"), o3.Irreps.spherical_harmonics(3)
    product, linear = o3.FullyConnectedTensorProduct(features, harmonics, features).cuda(), o3.Linear(features, "8x0e").cuda()
    inputs, points = torch.randn(500, features.dim).cuda(), torch.randn(500, 3).cuda()
    model = nn.ModuleList([product, linear])
    train(model, lambda: linear(product(inputs, o3.spherical_harmonics(harmonics, points, True))).square().mean(), 3)


def sequences(count, vocabulary, length):
    rows = [torch.randint(vocabulary, (length(index),), generator=torch.Generator().manual_seed(index)) for index in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def fit(model, dataset, collate=None, **options):
    import tempfile

    import transformers

    common = {"per_device_train_batch_size": 4, "max_steps": 4, "report_to": [], "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(output_dir=tempfile.mkdtemp(), **common, **options)
    evaluated = dataset[:8] if "eval_steps" in options else None
    transformers.Trainer(model, arguments, train_dataset=dataset, eval_dataset=evaluated, data_collator=collate).train()


@program
def trainer():
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=4, n_head=4, n_embd=256, vocab_size=5000))
    fit(model, sequences(64, 5000, lambda index: 128), gradient_accumulation_steps=2, bf16=True, eval_strategy="steps", eval_steps=2)


@program
def trainer_lora():
    import peft
    import transformers

    small = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8000}
    targets = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)), targets)

    def collate(rows):
        longest = max(len(row["input_ids"]) for row in rows)
        return {
            key: torch.stack([F.pad(row[key], (0, longest - len(row[key])), value=value) for row in rows])
            for key, value in (("input_ids", 0), ("labels", -100))
        }

    saving = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    fit(model, sequences(32, 8000, lambda index: 64 + 8 * (index % 5)), collate, fp16=True, optim="adamw_torch_fused", **saving)


@program
def lightning():
    import pytorch_lightning
    from torch.utils.data import DataLoader, TensorDataset

    class Module(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 10))

        def training_step(self, batch, index):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, index):
            self.log("validation", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    loader = DataLoader(TensorDataset(torch.randn(256, 512), torch.randint(10, (256,))), 32)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pytorch_lightning.Trainer(max_epochs=2, accelerator="gpu", devices=1, precision="16-mixed", gradient_clip_val=1.0, **quiet)
    trainer.fit(Module(), loader, loader)


@program
def accumulation():
    import accelerate

    accelerator = accelerate.Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True), 3)
    loader = torch.utils.data.DataLoader(torch.randn(64, 64, 256), 8)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@program
def sentence_pairs():
    import transformers

    small = {"hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 1536}
    model = transformers.BertModel(transformers.BertConfig(**small)).cuda()
    embed = lambda tokens: F.normalize(model(input_ids=tokens).last_hidden_state.mean(1), dim=-1)
    questions, answers = torch.randint(30000, (32, 48)).cuda(), torch.randint(30000, (32, 128)).cuda()
    train(model, lambda: F.cross_entropy(embed(questions) @ embed(answers).T * 20, torch.arange(32, device=DEVICE)), 3)


@program
def detection():
    import transformers

    small = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 768, "image_size": [256, 256]}
    model, images = transformers.YolosForObjectDetection(transformers.YolosConfig(**small)).cuda(), torch.randn(2, 3, 256, 256).cuda()
    train(model, lambda: model(images).logits.square().mean() + model(images).pred_boxes.mean(), 3)


@program
def muon():
    model = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 256, bias=False)).cuda()
    inputs = torch.randn(64, 512).cuda()
    train(model, lambda: model(inputs).square().mean(), 3, torch.optim.Muon(model.parameters(), lr=0.01))


@program
def more_optimizers():
    makers = (
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True, foreach=True),
        torch.optim.Adafactor,
        lambda parameters: torch.optim.LBFGS(parameters, max_iter=4, line_search_fn=None),
        lambda parameters: torch.optim.RMSprop(parameters, centered=True),
        torch.optim.NAdam,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.Rprop,
        lambda parameters: torch.optim.Adadelta(parameters, foreach=False),
        lambda parameters: torch.optim.Adam(parameters, amsgrad=True, capturable=True),
    )
    for make in makers:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()
        optimizer, inputs = make(model.parameters()), torch.randn(64, 256).cuda()
        optimize(optimizer, model, inputs, 3)


@program
def offload():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6)]).cuda()
    inputs = torch.randn(256, 1024).cuda()

    def loss():
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return model(inputs).square().mean()

    train(model, loss, 3)


@program
def selective_checkpoints():
    import functools

    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    model = nn.ModuleList([nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True) for _ in range(4)]).cuda()
    inputs = torch.randn(8, 256, 256).cuda()
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default, torch.ops.aten.mm.default])

    def loss():
        hidden = inputs
        for layer in model:
            hidden = checkpoint(layer, hidden, use_reentrant=False, context_fn=contexts)
        return hidden.square().mean()

    train(model, loss, 3)


@program
def conformer():
    import torchaudio

    waves = torch.randn(4, 16000).cuda()
    spectrogram, model = torchaudio.transforms.MelSpectrogram(16000, n_mels=80).cuda(), torchaudio.models.Conformer(80, 4, 256, 3, 31).cuda()
    frames = spectrogram(waves).transpose(1, 2).contiguous()
    lengths = torch.tensor([frames.shape[1]] * 4, device=DEVICE)
    train(model, lambda: model(frames, lengths)[0].square().mean(), 3)


@program
def policy():
    network = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)).cuda()
    optimizer, observations = torch.optim.Adam(network.parameters()), torch.randn(512, 8).cuda()
    for _ in range(2):
        distribution = torch.distributions.Categorical(logits=network(observations))
        actions = distribution.sample()
        before, advantages = distribution.log_prob(actions).detach(), torch.randn(512).cuda()
        for part in torch.randperm(512).split(128):
            distribution = torch.distributions.Categorical(logits=network(observations[part]))
            ratio = (distribution.log_prob(actions[part]) - before[part]).exp()
            gain = torch.min(ratio * advantages[part], ratio.clamp(0.8, 1.2) * advantages[part]).mean()
            loss = -gain - 0.01 * distribution.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()


def seconds(name, device):
    global DEVICE
    DEVICE = device
    if device == "cpu":
        nn.Module.cuda = torch.Tensor.cuda = lambda self: self
    times = []
    for _ in range(4):
        start = time.process_time()
        PROGRAMS[name]()
        times.append(time.process_time() - start)
    print(f"{name} on {device}: {min(times[1:]):.3f} s")


def main(name, *timing):
    if timing:
        return seconds(name, timing[1])
    if name == "list":
        return print(*PROGRAMS, sep="\n")
    record.begin()
    PROGRAMS[name]()
    record.figures()


main(*sys.argv[1:])
