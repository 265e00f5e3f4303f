"""One training step of a Qwen3.5 text model, or inference with Qwen3-8B: the memory programs of ci/figures.tsv.

Prints the figures of each rank: `figure NAME BYTES`. Weights are uninitialised, because memory depends on shapes only.
"""
import argparse
import math
import os

import torch
import torch.nn.functional as F
from torch import nn

QWEN3_5 = dict(
    vocab_size=248320, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2, head_dim=256, linear_conv_kernel_dim=4,
    linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=16, tie_word_embeddings=True,
    max_position_embeddings=262144, use_cache=False,
)
SIZES = {"0.8B": dict(hidden_size=1024, intermediate_size=3584), "2B": dict(hidden_size=2048, intermediate_size=6144)}
PARAMETERS = {"0.8B": 752_393_024, "2B": 1_881_825_088, "8B": 8_190_735_360}
QWEN3_8B = dict(
    vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, max_position_embeddings=40960, tie_word_embeddings=False,
)


def figure(name, value):
    os.write(1, f"figure {name} {value}\n".encode())  # in one piece, beside other ranks


def made(kind, config, name):
    """Returns a bfloat16 model in host memory whose weights are never written."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # before 5.0
        from transformers.modeling_utils import no_init_weights

    with no_init_weights():
        model = kind._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.tie_weights()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == PARAMETERS[name], f"{name} has {count} parameters, not {PARAMETERS[name]}: another configuration or version of transformers"
    return model


class Dequantised(torch.autograd.Function):
    """A product with a packed weight, which is unpacked again for the backward pass."""

    @staticmethod
    def forward(ctx, input, layer):
        ctx.layer = layer
        return F.linear(input, layer.unpacked(input.dtype))

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.layer.unpacked(gradient.dtype), None


class QuantisedLora(nn.Module):
    """A frozen linear layer of 4-bit codes with a scale per 64 weights, and a trained adapter in 32 bits. Nested scales are 8-bit codes with a 32-bit
    scale per 256."""

    def __init__(self, linear, nested, rank=8):
        super().__init__()
        self.shape = linear.weight.shape
        scales = linear.weight.numel() // 64
        self.register_buffer("codes", torch.empty(linear.weight.numel() // 2, dtype=torch.uint8))
        self.register_buffer("values", torch.empty(256, 2, dtype=linear.weight.dtype))
        self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8 if nested else torch.float32))
        self.nested = nested
        if nested:
            self.register_buffer("scale_values", torch.empty(256, 1))
            self.register_buffer("scale_scales", torch.empty(math.ceil(scales / 256)))
            self.register_buffer("offset", torch.empty(()))
        self.down = nn.Parameter(torch.empty(rank, linear.in_features))
        self.up = nn.Parameter(torch.empty(linear.out_features, rank))

    def unpacked_scales(self):
        if not self.nested:
            return self.scales
        values = F.embedding(self.scales.int(), self.scale_values).view(-1)
        return values.mul_(self.scale_scales.repeat_interleave(256)[: values.numel()]).add_(self.offset)

    def unpacked(self, dtype):
        scales = self.unpacked_scales().to(dtype)
        values = F.embedding(self.codes.int(), self.values)
        return (values.view(-1, 64) * scales[:, None]).view(self.shape)

    def forward(self, input):
        output = Dequantised.apply(input, self)
        adapter = F.linear(F.linear(input.to(self.down.dtype), self.down), self.up)
        return output + adapter.to(output.dtype) * 2.0


def quantised(model, nested):
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module is not head:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, QuantisedLora(module, nested))
    return model


def adapted(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def batch(length, vocabulary, device):
    tokens = torch.randint(100, vocabulary, (1, length))
    labels = tokens.clone()
    labels[:, : length // 2] = -100
    positions = torch.arange(length).expand(3, 1, length).clone()
    return {name: tensor.to(device) for name, tensor in dict(input_ids=tokens, labels=labels, position_ids=positions).items()}


def engine_of(model, optimizer, stage, accumulate):
    import deepspeed

    bucket = 5_000_000
    zero = dict(
        stage=stage, contiguous_gradients=True, reduce_scatter=True, reduce_bucket_size=bucket, allgather_partitions=True,
        allgather_bucket_size=bucket, overlap_comm=False, stage3_prefetch_bucket_size=bucket, stage3_param_persistence_threshold=100_000,
    )
    config = dict(
        train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=accumulate, gradient_clipping=1.0, zero_optimization=zero,
        zero_allow_untested_optimizer=True, bf16=dict(enabled=True), steps_per_print=1_000_000,
    )
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def train(args):
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if args.shard:
        torch.distributed.init_process_group("nccl")
    model = made(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**QWEN3_5, **SIZES[args.model]), args.model)
    if args.method == "lora":
        model = adapted(model)
    elif args.method in ("qlora", "nested"):
        model = quantised(model, args.method == "nested")
    if args.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": args.shard in ("zero2", "zero3")})
        if args.method != "full":
            model.enable_input_require_grads()
    model.train()
    layer = next(type(module) for module in model.modules() if type(module).__name__ == "Qwen3_5DecoderLayer")
    if args.shard == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        model = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({layer}), device_id=device, backward_prefetch=None, use_orig_params=False
        )
    else:
        model.to(device)
    if args.shard == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))
        for module in [module for module in model.modules() if isinstance(module, layer)]:
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)

    def optimizer_of():
        return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-5, foreach=False)

    by_deepspeed = args.shard in ("zero2", "zero3")
    if by_deepspeed:
        model = engine_of(model, optimizer_of(), int(args.shard[-1]), args.accumulate)
    batches = [batch(args.length, QWEN3_5["vocab_size"], device) for _ in range(args.accumulate)]
    optimizer = None if by_deepspeed else optimizer_of()
    torch.cuda.reset_peak_memory_stats()
    outputs = loss = None
    for micro in batches:
        del outputs, loss
        outputs = model(**micro, use_cache=False)
        if by_deepspeed:
            loss = outputs.loss
            model.backward(loss)
            model.step()
        else:
            loss = outputs.loss / args.accumulate
            loss.backward()
    if args.shard == "fsdp":
        figure("backward", torch.cuda.max_memory_allocated())
    if not by_deepspeed:
        optimizer.step()
    figure("peak", torch.cuda.max_memory_allocated())
    if args.shard:
        torch.distributed.destroy_process_group()


def infer():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = made(Qwen3ForCausalLM, Qwen3Config(**QWEN3_8B), "8B").eval().to("cuda")
    figure("loaded", torch.cuda.memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    tokens = torch.ones(1, 9, dtype=torch.long).to("cuda")
    mask = torch.ones_like(tokens, device="cpu").to("cuda")
    with torch.inference_mode():
        outputs = model(input_ids=tokens, attention_mask=mask, use_cache=True)
        token = outputs.logits[:, -1, :].argmax(dim=-1, keepdim=True)
        longer = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        outputs = model(input_ids=token, attention_mask=longer, past_key_values=outputs.past_key_values, use_cache=True)
        token = outputs.logits[:, -1, :].argmax(dim=-1, keepdim=True)
    figure("peak", torch.cuda.max_memory_allocated())
    figure("end", torch.cuda.memory_allocated())


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", choices=PARAMETERS)
parser.add_argument("method", choices=["full", "lora", "qlora", "nested", "infer"])
parser.add_argument("--length", type=int, default=16, help="tokens of the sequence")
parser.add_argument("--accumulate", type=int, default=1, help="batches before the optimizer step")
parser.add_argument("--checkpoint", action="store_true", help="recompute activations")
parser.add_argument("--shard", choices=["fsdp", "fsdp2", "zero2", "zero3"], help="under torchrun")
args = parser.parse_args()
infer() if args.method == "infer" else train(args)
