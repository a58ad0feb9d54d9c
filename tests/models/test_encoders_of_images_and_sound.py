# SPDX-License-Identifier: Apache-2.0
"""Encoders of images, of their captions and of sound: all layers are one call, or the report says why not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit

transformers = pytest.importorskip("transformers")

from lowbit.ops.run_program import KeptProgram  # noqa: E402

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
IMAGE, WORDS = {"image_size": 32, "patch_size": 8}, {"vocab_size": 99, "pad_token_id": 1}
SOUND = dict(
    vocab_size=32, conv_dim=(32, 32), conv_stride=(5, 4), conv_kernel=(10, 3), num_feat_extract_layers=2,
    num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4,
)  # fmt: skip
ONE_CALL = {
    "ViT": (IMAGE, 17),
    "DeiT": (IMAGE, 18),
    "SiglipVision": (IMAGE, 16),
    "SiglipText": (WORDS, 19),
    "Wav2Vec2": (SOUND, 80),
    "Wav2Vec2 stable": (SOUND | {"do_stable_layer_norm": True, "feat_extract_norm": "layer"}, 80),
    "Hubert": (SOUND, 80),
}
"""The settings of each model, and how many tokens a call has."""


def made(name: str, **settings: Any) -> nn.Module:
    kind = name.split()[0]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | settings)
    model = getattr(transformers, f"{kind}Model")._from_config(config, attn_implementation="lowbit").eval()
    for parameter in model.parameters():  # norms are made of ones, biases of zeros
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.3)
    lowbit.quantize_(model, lowbit.int8_weight_only())
    return model


def given_to(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(2, 1600, generator=generator)}
    ids = torch.randint(3, 90, (2, 12), generator=generator)
    return {"input_ids": ids, "attention_mask": (torch.arange(12) < torch.tensor([[7], [12]])).long()}


@torch.no_grad()
def results(model: nn.Module) -> Tensor:
    given = given_to(model)
    result = model(**given).last_hidden_state
    return result[given["attention_mask"].bool()] if "attention_mask" in given else result


@pytest.mark.parametrize("name", ONE_CALL)
def test_all_layers_are_one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, count = ONE_CALL[name]
    model = made(name, **settings)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    report = lowbit.fuse(model)
    assert {"(model)", "encoder"} & set(report)
    calls, run = [], KeptProgram.__call__

    def counted(self: KeptProgram, states: Any, inputs: Any, starts: Any) -> Tensor:
        calls.append(inputs[0].shape[:2])
        return run(self, states, inputs, starts)

    monkeypatch.setattr(KeptProgram, "__call__", counted)
    got = results(model)
    assert calls == [(1, count) if name == "SiglipText" else (2, count)]
    wanted = results(eager)
    assert float((got - wanted).norm() / wanted.norm()) < 1e-4


def test_layers_that_stay_say_why() -> None:
    for name, why in (
        ("CLIPVision", "its linear layers are not joined by an activation that the op has"),
        ("Dinov2", "its layer_scale1 is Dinov2LayerScale, not packed or fused"),
    ):
        model = made(name, **IMAGE)
        wanted = results(model)
        report = lowbit.fuse(model)
        assert why in report.left.values()
        assert float((results(model) - wanted).norm() / wanted.norm()) < 1e-4
