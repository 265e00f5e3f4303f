"""Trains models of public packages with small inputs: python ci/record.py ci/models.py [--compile | --until-oom] MODEL...

A MODEL is `hf TYPE CLASS`, with two narrow layers of an architecture of transformers, `timm NAME`, or `tv NAME` of torchvision. Each makes two training
steps with AdamW, a backward pass in bfloat16, and a forward pass without gradients; a language model also generates four tokens.
reports/h200/models.tsv has the figures of a GPU:

    harness exec --gpu h200-141 --values cpu -- python ci/record.py ci/models.py 'hf bert AutoModelForCausalLM'

With --compile, torch.compile compiles the model, and only the training steps run. With --until-oom, the process may use 256 MiB, and the batch doubles
until a training step runs out of memory. Then the program frees its memory as recovery code does, and trains with three quarters of that batch.
"""
import argparse
import random

import numpy
import torch

NARROW = {
    **dict.fromkeys("hidden_size d_model dim n_embd embed_dim hidden_dim word_embed_proj_dim embedding_size n_embed projection_dim out_hidden_size".split(), 64),
    **dict.fromkeys("num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers depth num_encoder_layers num_decoder_layers".split(), 2),
    **dict.fromkeys("num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads".split(), 4),
    **dict.fromkeys("num_key_value_heads n_head_kv num_kv_heads".split(), 2),
    **dict.fromkeys("head_dim d_kv v_head_dim mamba_d_head mamba_d_state attention_head_dim".split(), 16),
    **dict.fromkeys("intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim ffn_hidden_size n_inner".split(), 128),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts moe_num_experts".split(), 4),
    **dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size".split(), 64),
    **dict(num_experts_per_tok=2, moe_topk=2, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, mamba_n_heads=8),
    **dict(q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=8),
}
WORDS = 1000
MEMORY = 256 << 20  # of --until-oom
TOKENS = "pad bos eos decoder_start image video audio mask".split()


def narrow(config, depth=0):
    """Sets the sizes of a configuration and of its parts, where it has them."""
    from transformers import PretrainedConfig

    is_number = lambda name: type(getattr(config, name, None)) is int
    for name, size in NARROW.items():
        if is_number(name):
            try:
                setattr(config, name, size)
            except Exception:  # Some sizes are properties that follow from others.
                pass
    if is_number("vocab_size") and config.vocab_size > WORDS:
        config.vocab_size = WORDS
    for name in [f"{token}_token_id" for token in TOKENS] + ["image_token_index"]:
        if is_number(name) and getattr(config, name) >= WORDS:
            setattr(config, name, 3)
    for name in ("layer_types", "mlp_layer_types"):
        types = getattr(config, name, None)
        if isinstance(types, list) and len(types) > 2:
            setattr(config, name, (list(dict.fromkeys(types)) + types)[:2])
    if depth < 3:
        for part in list(vars(config).values()):
            if isinstance(part, PretrainedConfig):
                narrow(part, depth + 1)
    return config


def words(length):
    return torch.randint(5, 200, (2, length))


def decoder_words(config):
    return dict(decoder_input_ids=words(16)) if config.is_encoder_decoder else {}


def transformers_model(kind, class_name):
    import transformers

    config = narrow(transformers.CONFIG_MAPPING[kind]())
    model = getattr(transformers, class_name).from_config(config)
    match model.main_input_name:
        case "input_ids":
            ids = words(32)
            inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids)) | decoder_words(config)
        case "pixel_values":
            images = getattr(config, "vision_config", None) or config
            size = getattr(images, "image_size", 224)
            size = size if isinstance(size, (list, tuple)) else (size, size)
            inputs = dict(pixel_values=torch.randn(2, getattr(images, "num_channels", 3), *[min(int(side), 384) for side in size]))
        case "input_values":
            inputs = dict(input_values=torch.randn(2, 8000))
        case "input_features":
            bands = getattr(config, "num_mel_bins", None) or getattr(config, "feature_projection_input_dim", None) or 80
            inputs = dict(input_features=torch.randn(2, bands, 3000) if "whisper" in kind else torch.randn(2, 100, bands))
            inputs |= decoder_words(config)
        case other:
            raise SystemExit(f"models.py: {kind} needs {other}")
    return model, inputs, lambda model, inputs: model(**inputs)


def vision_model(model, size):
    return model, dict(x=torch.randn(2, *size)), lambda model, inputs: model(inputs["x"])


def make(package, name, *class_name):
    if package == "hf":
        return transformers_model(name, *class_name)
    if package == "timm":
        import timm

        model = timm.create_model(name)
        return vision_model(model, model.default_cfg["input_size"])
    import torchvision

    side = 299 if name == "inception_v3" else 224
    return vision_model(torchvision.models.get_model(name, weights=None), (3, side, side))


def tensors(output):
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (dict, list, tuple)):
        for part in output.values() if isinstance(output, dict) else output:
            yield from tensors(part)


def loss(output):
    means = [tensor.float().mean() for tensor in tensors(output) if tensor.is_floating_point() and tensor.requires_grad]
    return sum(means[1:], means[0])


def step(model, inputs, run, optimizer):
    output = run(model, inputs)
    loss(output).backward()
    optimizer.step()
    optimizer.zero_grad()


def train_until_oom(*training):
    model, inputs, run, optimizer = training
    torch.cuda.set_per_process_memory_fraction(MEMORY / torch.cuda.get_device_properties(0).total_memory)
    factor, grows, steps = 1, True, 0
    while grows or steps < 2:
        try:
            step(model, {name: tensor.repeat(factor, *[1] * (tensor.dim() - 1)) for name, tensor in inputs.items()}, run, optimizer)
            steps += not grows
            factor *= 2 if grows else 1
        except torch.OutOfMemoryError:
            if factor == 1:
                raise
            grows, steps, failed = False, 0, True
            factor = factor * 3 // 4
        else:
            failed = False
        if failed:  # Outside of `except`, where the error still refers to the tensors of the step.
            optimizer.zero_grad()
            torch.cuda.empty_cache()
    statistics = torch.cuda.memory_stats()
    print("figure factor", factor)
    print("figure ooms", statistics["num_ooms"])
    print("figure retries", statistics["num_alloc_retries"])


def train(options, package, *name):
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(0)
    model, inputs, run = make(package, *name)
    model = model.to("cuda").train()
    inputs = {name: tensor.to("cuda") for name, tensor in inputs.items()}
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)
    if options.until_oom:
        return train_until_oom(model, inputs, run, optimizer)
    if options.compile:
        model = torch.compile(model)
    for _ in range(2):
        step(model, inputs, run, optimizer)
    if options.compile:
        return
    with torch.autocast("cuda", torch.bfloat16):
        loss(run(model, inputs)).backward()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        run(model, inputs)
    if name[-1] == "AutoModelForCausalLM":
        model.generate(input_ids=inputs["input_ids"], max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)


def main(arguments=None):
    parser = argparse.ArgumentParser()
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--compile", action="store_true")
    modes.add_argument("--until-oom", action="store_true")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    options = parser.parse_args(arguments)
    for model in options.models:
        train(options, *model.split())


if __name__ == "__main__":
    main()
