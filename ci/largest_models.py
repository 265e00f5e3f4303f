"""Makes two training steps with a model of a public package and N rows of input: python ci/largest_models.py MODEL N

`ci/largest` searches for the largest N of each MODEL. Weights and inputs are made on the GPU.
"""
import sys

import torch


def images(model, side=224):
    return model, lambda n: model(torch.rand(n, 3, side, side))


def tokens(model, length):
    def loss(n):
        ids = torch.randint(100, (n, length))
        return model(input_ids=ids, labels=ids).loss

    return model, loss


def torchvision(name):
    from torchvision import models

    return images(models.get_model(name, weights=None))


def timm(name):
    import timm

    return images(timm.create_model(name))


def transformers(kind, class_name, length, **sizes):
    import transformers

    return tokens(getattr(transformers, class_name)(transformers.CONFIG_MAPPING[kind](use_cache=False, **sizes)), length)


def lora():
    import peft

    model, _ = transformers("gpt2", "GPT2LMHeadModel", 0)
    return tokens(peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=True)), 512)


def unet2d():
    import diffusers

    model = diffusers.UNet2DModel(sample_size=64, block_out_channels=(64, 128, 256), down_block_types=["DownBlock2D"] * 2 + ["AttnDownBlock2D"],
                                  up_block_types=["AttnUpBlock2D"] + ["UpBlock2D"] * 2)
    return model, lambda n: model(torch.rand(n, 3, 64, 64), torch.randint(1000, (n,))).sample


def segmentation():
    import segmentation_models_pytorch

    return images(segmentation_models_pytorch.Unet("resnet18", encoder_weights=None), 256)


def graph():
    from torch_geometric.nn import GraphSAGE

    model = GraphSAGE(128, 256, num_layers=3, out_channels=40)
    # N thousand nodes, with ten edges each.
    return model, lambda n: model(torch.rand(1000 * n, 128), torch.randint(1000 * n, (2, 10000 * n)))


def lstm():
    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(10000, 650)
            self.lstm = torch.nn.LSTM(650, 650, 2, dropout=0.5)
            self.head = torch.nn.Linear(650, 10000)

        def forward(self, ids):
            return self.head(self.lstm(self.embedding(ids))[0])

    model = Words()
    return model, lambda n: model(torch.randint(10000, (35, n)))


def length():
    model, _ = transformers("gpt2", "GPT2LMHeadModel", 0, n_positions=1 << 16, n_layer=4, attn_implementation="eager")
    # One text of N tokens, so attention scores grow with the square.
    return model, lambda n: tokens(model, n)[1](1)


MODELS = {
    "resnet50": lambda: torchvision("resnet50"),
    "swin_t": lambda: torchvision("swin_t"),
    "vit_small": lambda: timm("vit_small_patch16_224"),
    "convnext_tiny": lambda: timm("convnext_tiny"),
    "gpt2": lambda: transformers("gpt2", "GPT2LMHeadModel", 512),
    "bert": lambda: transformers("bert", "BertForMaskedLM", 128),
    "llama": lambda: transformers("llama", "LlamaForCausalLM", 512, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16),
    "lora": lora,
    "unet2d": unet2d,
    "segmentation": segmentation,
    "graph": graph,
    "lstm": lstm,
    "length": length,
}


def main(name, n):
    torch.set_default_device("cuda")
    model, run = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        run(int(n)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
