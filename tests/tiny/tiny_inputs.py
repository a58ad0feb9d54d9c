# SPDX-License-Identifier: Apache-2.0
"""Inputs of any tiny model: a value for each parameter of its `forward` that has some here, by its name. Where models
differ in a shape, the first is taken that the model takes. Text is padded on the left, sound on the right; an image or
a sound in a text has as many tokens as the model makes features of it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tiny_settings import INPUTS
from torch import Tensor, nn
from transformers import PreTrainedConfig

TOKENS = torch.arange(2, 26).view(2, 12)
SEEN = torch.ones(2, 12, dtype=torch.long)
SEEN[0, :3] = 0
FRAMES, SAMPLES = 64, 3840
GRID = torch.tensor([[1, 4, 4]] * 2)  # two images of 4 x 4 patches

TEXT = ("input_ids", "attention_mask", "decoder_input_ids")

Inputs = dict[str, Tensor]


def inputs(model: nn.Module, *, text_alone: bool = False) -> Inputs:
    """The first inputs that the model takes. Raises what it raises of the first, where it takes none."""
    refused: Exception | None = None
    for given in [{"input_ids": TOKENS, "attention_mask": SEEN}] if text_alone else _candidates(model):
        try:
            given = _with_placeholders(model, given)
            with torch.no_grad():
                model(**given)
            return given
        except Exception as error:  # any, of any architecture
            refused = refused or error
    raise refused or TypeError(f"no input of {type(model).__name__}.forward is made here")


def _candidates(model: nn.Module) -> Iterator[Inputs]:
    parameters = inspect.signature(model.forward).parameters
    values = {name: _values(name, model.config, parameters) for name in parameters}
    values = {name: some for name, some in values.items() if some}
    for chosen in itertools.product(*values.values()):
        yield {name: value for name, value in zip(values, chosen, strict=True) if value is not None}
    if "input_ids" in values:
        yield {name: some[0] for name, some in values.items() if name in TEXT}


def _values(name: str, config: Any, parameters: Any) -> list[Tensor | None]:
    """The values that the parameter may have, the best first; None leaves it out."""
    if name in (own := INPUTS.get(config.model_type, {})):
        return [_noise(*own[name]) if isinstance(own[name], tuple) else own[name]]
    if name in ("input_ids", "qformer_input_ids", "protein_input_ids", "task_inputs"):
        return [TOKENS]
    if name == "decoder_input_ids":
        return [TOKENS[:, 3:9]]
    if name == "bbox":
        return [TOKENS[..., None].expand(2, 12, 4)]
    if name == "attention_mask" and "input_ids" in parameters:
        return [SEEN]
    if name == "attention_mask":
        return (
            [_heard(FRAMES), None]
            if "input_features" in parameters
            else [_heard(SAMPLES), None]
            if "input_values" in parameters
            else []
        )
    return _OF[name](config, parameters) if name in _OF else []


def _heard(length: int) -> Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    return mask


def setting(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these settings that the configuration or a part of it has."""
    parts = list(_parts(config))
    found = (getattr(part, name, None) for name in names for part in parts)
    return next((value for value in found if value is not None), default)


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            yield from _parts(part)


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _images(config: Any, parameters: Any) -> list[Tensor | None]:
    size = setting(config, "image_size", default=32)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels, patch = (
        setting(config, "num_channels", "in_channels", default=3),
        setting(config, "patch_size", default=8),
    )
    patch = patch if isinstance(patch, int) else patch[-1]
    if {"grid_thw", "image_grid_thw", "image_grid_hw"} & parameters.keys():
        frames = setting(config, "temporal_patch_size", default=1)
        return [
            _noise(32, channels * frames * patch**2),
            _noise(32, channels, patch, patch),
            _noise(1, 32, channels, patch, patch),
        ]
    if "spatial_shapes" in parameters:
        return [_noise(2, 16, channels * patch**2)]
    plain = _noise(2, channels, height, width)
    return [plain, plain[:, None], plain[:, None].expand(2, setting(config, "num_frames", default=2), *plain.shape[1:])]


def _videos(config: Any, parameters: Any) -> list[Tensor | None]:
    images = _images(config, {})[0]
    frames = setting(config, "num_frames", "frames_per_clip", default=2)
    is_optional = parameters["pixel_values_videos"].default is None and "input_ids" in parameters
    return [] if is_optional or images is None else [images[:, None].repeat(1, frames, 1, 1, 1)]


def _features(config: Any, parameters: Any) -> list[Tensor | None]:
    bins = setting(
        config,
        "input_dim",
        "num_mel_bins",
        "feature_size",
        "input_feat_per_channel",
        "feature_projection_input_dim",
        "n_mels",
        default=80,
    )
    frames = 2 * setting(config, "max_source_positions", default=FRAMES // 2)
    return [_noise(2, FRAMES, bins), _noise(2, bins, FRAMES), _noise(2, bins, frames)]


def _sounds(config: Any, parameters: Any) -> list[Tensor | None]:
    return [
        _noise(2, SAMPLES),
        _noise(2, 1, SAMPLES),
        _noise(2, setting(config, "max_length", default=FRAMES), setting(config, "num_mel_bins", default=80)),
    ]


_OF: dict[str, Callable[[Any, Any], list[Tensor | None]]] = {
    "pixel_values": _images,
    "high_res_pixel_values": _images,
    "hidden_states": lambda config, parameters: _images(config, parameters) if "grid_thw" in parameters else [],
    "pixel_values_videos": _videos,
    "grid_thw": lambda config, parameters: [GRID],
    "image_grid_thw": lambda config, parameters: [GRID],
    "image_grid_hw": lambda config, parameters: [GRID[:, 1:]],
    "image_sizes": lambda config, parameters: [torch.tensor([[32, 32]] * 2), None],
    "target_sizes": lambda config, parameters: [GRID[:, 1:]],
    "spatial_shapes": lambda config, parameters: [GRID[:, 1:]],
    "pixel_attention_mask": lambda config, parameters: (
        [torch.ones(2, 16, dtype=torch.long)] if "spatial_shapes" in parameters else []
    ),
    "image_merge_sizes": lambda config, parameters: [torch.tensor([2, 2])],
    "merge_sizes": lambda config, parameters: [torch.tensor([2, 2])],
    "input_features": _features,
    "input_features_mask": lambda config, parameters: [torch.ones(2, FRAMES, dtype=torch.long)],
    "feature_attention_mask": lambda config, parameters: [torch.ones(2, FRAMES, dtype=torch.long)],
    "input_values": _sounds,
    "padding_mask": lambda config, parameters: (
        [torch.ones(2, FRAMES, dtype=torch.long), None] if "input_features" in parameters else []
    ),
}


def _with_placeholders(model: nn.Module, given: Inputs) -> Inputs:
    """Put the tokens that stand for an image or a sound behind the text."""
    given = dict(given)
    for kind, name in (("image", "pixel_values"), ("audio", "input_features")):
        make = getattr(
            model, f"get_{kind}_features", getattr(getattr(model, "model", None), f"get_{kind}_features", None)
        )
        token = setting(model.config, f"{kind}_token_id", f"{kind}_token_index")
        if not {name, "input_ids"} <= given.keys() or token is None:
            continue
        count = 1 if make is None else _count(model, kind, make, given)
        placeholders = torch.full((2, count), token)
        given["input_ids"] = torch.cat([given["input_ids"], placeholders], 1)
        given["attention_mask"] = torch.cat([given["attention_mask"], torch.ones_like(placeholders)], 1)
        for types in {"mm_token_type_ids", "token_type_ids"} & inspect.signature(model.forward).parameters.keys():
            given[types] = (given["input_ids"] == token).long()
    return given


def _count(model: nn.Module, kind: str, make: Callable[..., Any], given: Inputs) -> int:
    """How many features the model makes of one of the two."""
    inner = getattr(getattr(model, "model", None), f"get_{kind}_features", make)
    taken = inspect.signature(inner).parameters.keys() - {"attention_mask"}
    with torch.no_grad():
        made = make(**{name: value for name, value in given.items() if name in taken})
    return sum(one.shape[:-1].numel() for one in _tensors(getattr(made, "pooler_output", made))) // 2


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [one for part in value for one in _tensors(part)]
