"""Runs a training script of openai/parameter-golf, and prints the figures of its last line on memory as `figure NAME MIB`:

    python ci/figures_golf.py LOG [NAME=VALUE]...

LOG is a log of the repository that begins with the script. The script has the batch and the length of the log, four steps, and made-up data: random
tokens, and a tokenizer of the same size. NAME=VALUE are other variables of its environment.
"""

import array
import os
import random
import re
import runpy
import sys
import tempfile
from pathlib import Path


def write_shard(path, tokens):
    header = array.array("i", [20240520, 1, tokens] + [0] * 253)
    path.write_bytes(header.tobytes() + array.array("H", random.choices(range(1000), k=tokens)).tobytes())


def write_data(folder, vocabulary):
    import sentencepiece

    data = folder / "data"
    data.mkdir()
    write_shard(data / "fineweb_train_000000.bin", 2**22)
    write_shard(data / "fineweb_val_000000.bin", 2**20 + 1)
    words = ("".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=random.randint(2, 9))) for _ in range(50_000))
    text = folder / "text"
    text.write_text("".join(word + "\n" for word in words))
    model = folder / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(model), vocab_size=vocabulary, model_type="bpe", minloglevel=2)
    return {"DATA_PATH": str(data), "TOKENIZER_PATH": f"{model}.model"}


def main():
    random.seed(1)
    log = Path(sys.argv[1]).read_text()
    source, recorded = log.split("=" * 100 + "\n", 1)
    environment = {"ITERATIONS": "4", "WARMUP_STEPS": "2", "MAX_WALLCLOCK_SECONDS": "0", "VAL_LOSS_EVERY": "0"}
    for name in ("train_batch_tokens", "train_seq_len"):
        environment[name.upper()] = re.search(rf"\b{name}:(\d+)", recorded)[1]
    environment |= dict(setting.split("=", 1) for setting in sys.argv[2:])
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        os.environ |= write_data(folder, int(environment.get("VOCAB_SIZE", "1024"))) | environment
        script = folder / "train_gpt.py"
        script.write_text(source)
        os.chdir(folder)
        sys.argv = [str(script)]
        try:
            runpy.run_path(str(script), run_name="__main__")
        except ZeroDivisionError:
            print("the number of bytes is not computed; the training is complete")
        print_figures()


def print_figures():
    """The expressions of the scripts, which print them after the last step."""
    import torch

    print("figure", "max_memory_allocated", f"{torch.cuda.max_memory_allocated() // 1024 // 1024}MiB")
    print("figure", "max_memory_reserved", f"{torch.cuda.max_memory_reserved() // 1024 // 1024}MiB")


if __name__ == "__main__":
    main()
