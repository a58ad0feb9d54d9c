# SPDX-License-Identifier: Apache-2.0
"""qwen35, qwen35moe and qwen3next: Qwen3.5 and Qwen3-Next, in which every fourth layer has attention and the others a
gated delta net.

llama.cpp's converter changes the delta net: ``ssm_a`` is -exp(A_log), the convolution has lost a dimension, and 1 is
added to all norms but that of the delta net. Value heads of Qwen3.5 are in another order: in the model those of a key
head follow each other, in the file the first of each key head come first, then the second of each.

Qwen3-Next is read as a Qwen3.5, which computes the same: the two differ in how the projections of a delta net are
divided into matrices, and a file divides those of Qwen3-Next nearly as Qwen3.5 does. transformers' own class has
matrices whose rows are in tensors of different types. ``ssm_ba`` has, for each key head, the rows of beta, then those
of alpha of its value heads. In files of before 2026 ``ssm_in`` has, for each key head, the rows of q, k, v and z.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import GGUFTensor, TensorProcessor

from lowbit.checkpoints.gguf.architectures import ROOT_MEAN_SQUARE, Architecture, has, no_window
from lowbit.checkpoints.gguf.divided_tensors import DividedTensor
from lowbit.checkpoints.gguf.expert_keys import ExpertKeys
from lowbit.checkpoints.gguf.further_layers import without_further_layers
from lowbit.checkpoints.gguf.metadata import Metadata

_A, _DT, _CONV, _OUT = "ssm_a", "ssm_dt.bias", "ssm_conv1d.weight", "ssm_out.weight"
_OF_HEADS = (_A, _DT, "ssm_alpha.weight", "ssm_beta.weight")
"""Tensors with a row for each value head."""
_BEHIND_KEYS = ("attn_qkv.weight", _CONV)
"""Tensors that have the rows of queries and keys before those of values."""


class GatedDeltaNetTensors(TensorProcessor):
    """Undoes the converter's changes, and makes them again."""

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> GGUFTensor:
        """Return the values of the model for those of the file."""
        rows, of = self._rows(name), _in_layer(name)
        weights = weights if rows is None else weights[rows]
        if of == _A:
            weights = np.log(-weights)
        elif of == _CONV:
            weights = weights[:, None]
        elif _is_shifted_norm(name):
            weights = weights - 1
        return GGUFTensor(weights, name, {})

    def restore(self, values: np.ndarray, name: str) -> np.ndarray:
        """Return the values of the file for those of the model."""
        rows, of = self._rows(name), _in_layer(name)
        if of == _A:
            values = -np.exp(values)
        elif of == _CONV:
            values = values[:, 0]
        elif _is_shifted_norm(name):
            values = values + 1
        return values if rows is None else values[np.argsort(rows)]

    def columns(self, name: str) -> np.ndarray | None:
        """Return the column of the file for each column of the model, or None if the order is the same."""
        return self._values(self.config["linear_value_head_dim"]) if _in_layer(name) == _OUT else None

    def _rows(self, name: str) -> np.ndarray | None:
        """Return the row of the file for each row of the model, or None if the order is the same."""
        of, size = _in_layer(name), self.config["linear_value_head_dim"]
        if of in _OF_HEADS:
            return self._values(1)
        if of == "attn_gate.weight":
            return self._values(size)
        if of not in _BEHIND_KEYS:
            return None
        before = 2 * self.config["linear_num_key_heads"] * self.config["linear_key_head_dim"]
        return np.concatenate([np.arange(before), before + self._values(size)])

    def _values(self, size: int) -> np.ndarray:
        """Return the positions in the file of the numbers of all value heads, ``size`` of each."""
        key_heads, value_heads = self.config["linear_num_key_heads"], self.config["linear_num_value_heads"]
        numbers = np.arange(value_heads * size)
        return numbers.reshape(value_heads // key_heads, key_heads, size).swapaxes(0, 1).ravel()


class Qwen3NextTensors(GatedDeltaNetTensors):
    """The same for files that have value heads in the order of the model."""

    def columns(self, name: str) -> None:
        return None

    def _rows(self, name: str) -> None:
        return None


def _rows_by_key_head(config: PreTrainedConfig, sizes: tuple[int, ...], count: int) -> tuple[np.ndarray, ...]:
    """Return the rows of two parameters in a tensor that has, for each key head, blocks of ``sizes`` rows. The first
    ``count`` blocks are the first parameter's, all of one block before those of the next; the last one is the second's.
    """
    rows = np.arange(config.linear_num_key_heads * sum(sizes)).reshape(config.linear_num_key_heads, -1)
    blocks = [block.ravel() for block in np.split(rows, np.cumsum(sizes)[:-1], axis=1)]
    return np.concatenate(blocks[:count]), np.concatenate(blocks[count:])


def _rows_of_ba(config: PreTrainedConfig) -> tuple[np.ndarray, ...]:
    each = config.linear_num_value_heads // config.linear_num_key_heads
    return _rows_by_key_head(config, (each, each), 1)


def _rows_of_qkvz(config: PreTrainedConfig) -> tuple[np.ndarray, ...]:
    each = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    size = config.linear_key_head_dim
    return _rows_by_key_head(config, (size, size, each, each), 3)


def _in_layer(name: str) -> str:
    return name.split(".", 2)[-1] if name.startswith("blk.") else name


def _is_shifted_norm(name: str) -> bool:
    return name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")


def _qwen35(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    rope = {"mrope_section": keys.sections("rope.dimension_sections"), "mrope_interleaved": True}
    return _delta_nets(keys, known) | {"rope_parameters": known["rope_parameters"] | rope}


def _qwen3next(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    columns = keys.count("rope.dimension_count", known["head_dim"])
    rope = {"mrope_section": [columns // 2, 0, 0], "mrope_interleaved": True}  # all columns rotate with the time
    return _delta_nets(keys, known) | {"rope_parameters": known["rope_parameters"] | rope}


def _delta_nets(keys: Metadata, known: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of the gated delta nets, and which layers have one."""
    of_layers = without_further_layers(keys, known)
    key_heads, value_heads = keys.count("ssm.group_count"), keys.count("ssm.time_step_rank")
    if value_heads % key_heads:
        keys.refuse("ssm.time_step_rank", f"a multiple of the {key_heads} key heads", value_heads)
    if (inner := keys.count("ssm.inner_size")) % value_heads:
        keys.refuse("ssm.inner_size", f"a multiple of the {value_heads} value heads", inner)
    every = keys.count("full_attention_interval", 4)
    has_attention = [layer % every == every - 1 for layer in range(of_layers["num_hidden_layers"])]
    return (
        of_layers
        | {
            "attention_bias": has(keys, "attn_q.bias"),
            "layer_types": ["full_attention" if attends else "linear_attention" for attends in has_attention],
            "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
            "linear_key_head_dim": keys.count("ssm.state_size"),
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": value_heads,
            "linear_value_head_dim": inner // value_heads,
        }
        | no_window(keys, known)
    )


_NAMES = {_A: "linear_attn.A_log", _DT: "linear_attn.dt_bias"}
_OF_ALL = dict(epsilon=(ROOT_MEAN_SQUARE, "rms_norm_eps"), partial_rotary=True)
_OF_QWEN35 = _OF_ALL | dict(more=_qwen35, tensors=GatedDeltaNetTensors, names=_NAMES)
_WITH_EXPERTS = dict(
    model_type="qwen3_5_moe_text",
    has_dense_mlp=False,
    experts=ExpertKeys(
        count="num_experts",
        inner="moe_intermediate_size",
        norm_by_default=True,
        shared_inner="shared_expert_intermediate_size",
    ),
)
_IN = "linear_attn.in_proj_{}.weight".format
QWEN35 = Architecture(model_type="qwen3_5_text", **_OF_QWEN35)
QWEN35MOE = Architecture(**_WITH_EXPERTS, **_OF_QWEN35)
QWEN3NEXT = Architecture(
    more=_qwen3next,
    tensors=Qwen3NextTensors,
    names=_NAMES
    | {
        "attn_qkv.weight": _IN("qkv"),
        "attn_gate.weight": _IN("z"),
        _CONV: "linear_attn.conv1d.weight",
        "ssm_norm.weight": "linear_attn.norm.weight",
        _OUT: "linear_attn.out_proj.weight",
    },
    divided={
        "ssm_ba.weight": DividedTensor((_IN("b"), _IN("a")), _rows_of_ba),
        "ssm_in.weight": DividedTensor((_IN("qkv"), _IN("z")), _rows_of_qkvz),
    },
    **_WITH_EXPERTS,
    **_OF_ALL,
)
