#!/usr/bin/env python3
"""Cases of vLLM, TRL and SGLang for `harness exec`, with random weights of a small Llama that is written into the current folder. See `ci/engines`.

    harness exec --memory 24GiB -- python ci/engine_cases.py CASE

Cases: models (only writes them), eager, graphs, prefixes, sleep, lora, ranks (with `--devices 2`), training and leak (with `--values cpu`); with a
Python of SGLang sglang, sglang-eager, sglang-triton, sglang-flashinfer and sglang-native (with `--values cpu`), sglang-sleep, sglang-ranks (with
`--devices 2`).
"""

import json
import os
import sys

SMALL = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", hidden_size=512, intermediate_size=1376, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=4, head_dim=64, vocab_size=32000, max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=10000.0,
    tie_word_embeddings=False, torch_dtype="bfloat16", bos_token_id=0, eos_token_id=1, initializer_range=0.02, attention_bias=False,
)  # fmt: skip
# The configuration of Llama 3.1 8B.
LARGE = dict(
    SMALL, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0,
    rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, rope_type="llama3"),
)  # fmt: skip


def write_models():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    for folder, config in (("tiny-llama", SMALL), ("llama-3.1-8b", LARGE)):
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
        with open(folder + "/config.json", "w") as file:
            json.dump(config, file)


def write_adapter(folder, rank=8):
    import torch
    from safetensors.torch import save_file

    os.makedirs(folder, exist_ok=True)
    weights = {}
    for layer in range(SMALL["num_hidden_layers"]):
        for name, size in (("q_proj", 512), ("v_proj", 256)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[place + ".lora_A.weight"] = torch.zeros(rank, 512, dtype=torch.bfloat16)
            weights[place + ".lora_B.weight"] = torch.zeros(size, rank, dtype=torch.bfloat16)
    save_file(weights, folder + "/adapter_model.safetensors")
    with open(folder + "/adapter_config.json", "w") as file:
        json.dump(dict(peft_type="LORA", r=rank, lora_alpha=16, target_modules=["q_proj", "v_proj"], bias="none", task_type="CAUSAL_LM"), file)
    return os.path.abspath(folder)


def tokens(outputs):
    return [len(output.outputs[0].token_ids) for output in outputs]


def used():
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def train(phases, is_leaking):
    """Trains with GRPO of TRL. vLLM generates in the same process, and sleeps while the policy is trained."""
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("tiny-llama")).save_pretrained("policy")
    AutoTokenizer.from_pretrained("tiny-llama").save_pretrained("policy")
    kept, awake, asleep, trained = [], [], [], []

    def reward(completions, **_):
        features = torch.ones(len(completions), 1 << 18, device="cuda")
        if is_leaking:
            kept.append(features)
        return features.mean(1).tolist()

    class Measure(TrainerCallback):
        def on_step_end(self, *_, **__):
            trained.append(used())

    options = dict(vllm_mode="colocate", vllm_enable_sleep_mode=True, vllm_gpu_memory_utilization=0.3, vllm_max_model_length=256)
    steps = dict(max_steps=phases, per_device_train_batch_size=4, num_generations=4, max_completion_length=32)
    files = dict(output_dir="trained", report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True)
    trainer = GRPOTrainer(
        model="policy", reward_funcs=reward, args=GRPOConfig(use_vllm=True, **options, **steps, **files), callbacks=[Measure()],
        train_dataset=Dataset.from_list([{"prompt": f"Hello {number}"} for number in range(16)]),
    )  # fmt: skip
    llm = trainer.vllm_generation.llm
    sleep = llm.sleep

    def measure_and_sleep(**level):
        awake.append(used())
        sleep(**level)
        asleep.append(used())

    llm.sleep = measure_and_sleep
    trainer.train()
    for name, amounts in (("generated", awake), ("asleep", asleep), ("trained", trained)):
        print(f"{name}: " + ", ".join(f"phase {phase}: {amounts[phase - 1] >> 20} MiB" for phase in (1, 2, 3, phases)))
        assert len(amounts) == phases and (len({*amounts[2:]}) == 1) != is_leaking, amounts


SGLANG = {
    "sglang": {},
    "sglang-eager": dict(disable_cuda_graph=True),
    "sglang-triton": dict(attention_backend="triton"),
    "sglang-flashinfer": dict(attention_backend="flashinfer", disable_cuda_graph=True),
    "sglang-native": dict(attention_backend="torch_native", disable_cuda_graph=True),
    "sglang-sleep": dict(enable_memory_saver=True),
    "sglang-ranks": dict(tp_size=2),
}


def sglang(case):
    import sglang

    engine = sglang.Engine(model_path="tiny-llama", load_format="dummy", log_level="info", **SGLANG[case])

    def generate():
        outputs = engine.generate(["Hello", "Hi there"], dict(max_new_tokens=16, ignore_eos=True))
        assert [output["meta_info"]["completion_tokens"] for output in outputs] == [16, 16], outputs

    generate()
    if case == "sglang-sleep":
        awake = used()
        engine.release_memory_occupation()
        asleep = used()
        engine.resume_memory_occupation()
        print(f"level: {awake / 2**30:.2f} GiB, asleep {asleep / 2**30:.2f} GiB")
        assert asleep < awake == used()
        generate()
    engine.shutdown()


def main(case):
    write_models()
    if case == "models":
        return
    if case in ("training", "leak"):
        train(phases=int(os.environ.get("PHASES", 16)), is_leaking=case == "leak")
        print(case, "ok")
        return
    if case in SGLANG:
        sglang(case)
        print(case, "ok")
        return
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    def engine(**options):
        return LLM(model="tiny-llama", load_format="dummy", **{"enforce_eager": True, **options})

    def some(count):
        return SamplingParams(max_tokens=count, ignore_eos=True)

    if case in ("eager", "graphs"):
        outputs = engine(enforce_eager=case == "eager").generate(["Hello, my name is"], some(16))
        assert tokens(outputs) == [16] and outputs[0].outputs[0].finish_reason == "length"
    elif case == "prefixes":
        # Prompts of several steps, whose beginnings are equal.
        llm = engine(max_num_batched_tokens=256, max_num_seqs=16)
        outputs = llm.generate(["x" * 700 + str(number) * (10 * number) for number in range(24)], some(20))
        assert tokens(outputs) == 24 * [20] and [output.num_cached_tokens for output in outputs[:3]] == [0, 688, 688]
    elif case == "sleep":
        llm = engine(enable_sleep_mode=True, gpu_memory_utilization=0.5)
        awake = used()
        for level in (1, 2):
            llm.sleep(level=level)
            asleep = used()
            llm.wake_up(tags=["weights"])
            weights = used()
            llm.wake_up(tags=["kv_cache"])
            print(f"level {level}: {awake / 2**30:.2f} GiB, asleep {asleep / 2**30:.2f} GiB, with weights {weights / 2**30:.2f} GiB")
            assert asleep < weights < used() == awake
            assert tokens(llm.generate(["Hello"], some(8))) == [8]
    elif case == "lora":
        adapters = [None, *(LoRARequest(name, number, write_adapter(name)) for number, name in enumerate(("one", "two"), 1))]
        outputs = engine(enable_lora=True, max_loras=2, max_lora_rank=8).generate(3 * ["Hello"], some(8), lora_request=adapters)
        assert tokens(outputs) == 3 * [8]
    elif case == "ranks":
        assert tokens(engine(tensor_parallel_size=2).generate(3 * ["Hello"], some(8))) == 3 * [8]
    else:
        sys.exit(__doc__)
    print(case, "ok")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) == 2 else "")
