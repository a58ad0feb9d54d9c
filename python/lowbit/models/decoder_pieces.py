# SPDX-License-Identifier: Apache-2.0
"""The linear layers and norms of a transformers decoder, grouped by whether they read or write the residual stream.

    stream = embedding(tokens)
    stream += o_proj(attention(q_proj(x), k_proj(x), v_proj(x))),   x = norm(stream)
    stream += down_proj(act(gate_proj(x)) * up_proj(x)),            x = norm(stream)
    logits = head(norm(stream))

Modules must have the names that Llama and similar models use. An error names any module that does not.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowbit.ops.fakes import FLOATS
from lowbit.quant.adapters import adapter_modules
from lowbit.quant.fused import hooked
from lowbit.quant.fused_norm import norm_facts
from lowbit.quant.gated_mlp import GATED_LAYERS
from lowbit.quant.kinds import stored_weight
from lowbit.quant.quant_embedding import QuantEmbedding, is_scaled_embedding
from lowbit.quant.quant_linear import QuantLinear

APART = ("q_proj", "k_proj", "v_proj")
PACKED = ("qkv_proj",)  # Phi-3
HEAD_NORMS = ("q_norm", "k_norm")
HALVES = ("self_attn", "mlp")
TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
FOUR_NORMS = (*TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_PACKED_MLP = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm of the residual stream, with gains ``offset + weight``, and the linear layers that read its output."""

    module: nn.Module
    offset: float
    readers: tuple[nn.Linear, ...]


@dataclass(frozen=True, slots=True)
class Half:
    """The attention or the MLP of a decoder layer.

    Args:
        norm: the norm before it.
        inner: the linear layer whose last ``inner_rows`` output rows become the input of ``writer``: the value rows, or
            the up projection.
        inner_rows: the number of these rows.
        writer: the linear layer whose output is added to the stream.
        head_dim: the size of an attention head; 0 for an MLP.
    """

    norm: Norm
    inner: nn.Linear
    inner_rows: int
    writer: nn.Linear
    head_dim: int


@dataclass(frozen=True, slots=True)
class Decoder:
    """The modules of a decoder with its head. ``names`` maps the id of each module to its qualified name."""

    embedding: nn.Embedding
    halves: tuple[Half, ...]
    last: Norm
    names: dict[int, str]

    @property
    def head(self) -> nn.Linear:
        return self.last.readers[0]

    @property
    def tied(self) -> bool:
        return stored_weight(self.head) is stored_weight(self.embedding)

    @property
    def words(self) -> int:
        return self.embedding.num_embeddings

    @property
    def hidden(self) -> int:
        return self.embedding.embedding_dim


def is_decoder_layer(module: nn.Module) -> bool:
    """Whether the module has the two submodules of a decoder layer, ``self_attn`` and ``mlp``, whatever its class."""
    return module._modules.keys() >= set(HALVES)


def decoder_of(function: str, model: nn.Module) -> Decoder:
    """Return the modules of ``model``, checking that they hold all of its parameters.

    Args:
        function: the name of the public function that ``model`` was passed to, for errors.
        model: a language model with a decoder and a head.

    Raises:
        TypeError: ``model`` is not a module, or a weight is not float32, bfloat16, float16 or float64.
        ValueError: a module is missing, unsupported (LayerNorm, experts, quantized, an adapter), hooked, shared or not
            on the CPU, or a parameter belongs to none of these modules. The message names it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}")
    return _Finder(function, model).decoder()


class _Finder:
    def __init__(self, function: str, model: nn.Module) -> None:
        self.function, self.model = function, model
        self.names = {id(module): name for name, module in model.named_modules()}
        self.known: set[int] = set()  # modules whose parameters are accounted for

    def decoder(self) -> Decoder:
        if adapter_modules(self.model):
            self.refuse("model must be without adapters of peft, got one with them: merge_and_unload() takes them in")
        head = self.head()  # first, because its errors are the clearest
        module = self.stack()
        table = self.child(module, "embed_tokens", nn.Embedding)
        halves = tuple(half for layer in module.layers for half in self.halves(layer, table.embedding_dim))
        last = self.norm(module, "norm", table.embedding_dim, (head,))
        self.check_hooks()
        self.check_parameters({id(stored_weight(table))} & {id(stored_weight(head))})
        return Decoder(table, halves, last, self.names)

    def refuse(self, text: str) -> Any:
        raise ValueError(f"{self.function}: {text}")

    def head(self) -> nn.Linear:
        find = getattr(self.model, "get_output_embeddings", None)
        head = find() if callable(find) else None
        if not isinstance(head, nn.Module):
            self.refuse(
                f"model must be a language model with an output head (get_output_embeddings), got "
                f"{type(self.model).__name__}"
            )
        return self.checked(self.names.get(id(head), "the output head"), head, nn.Linear)

    def stack(self) -> nn.Module:
        """Return the only module that has a list of decoder layers."""
        stacks = [
            module
            for module in self.model.modules()
            if isinstance(layers := module._modules.get("layers"), nn.ModuleList) and any(map(is_decoder_layer, layers))
        ]
        if len(stacks) != 1:
            got = ", ".join(self.names[id(module)] or "the model itself" for module in stacks) or "none"
            self.refuse(f"model must have one list of decoder layers with self_attn and mlp, got {got}")
        return stacks[0]

    def halves(self, layer: nn.Module, hidden: int) -> tuple[Half, Half]:
        name = self.names[id(layer)]
        if not is_decoder_layer(layer):
            self.refuse(f"{name} must have self_attn and mlp, got {', '.join(layer._modules)}")
        if more := [norm for norm in FOUR_NORMS[2:] if norm in layer._modules]:
            self.refuse(
                f"{name} must have norms in front of attention and MLP alone, got {more[-1]}: a norm behind them "
                "scales single channels of its result"
            )
        attention, mlp = (layer._modules[half] for half in HALVES)
        names = PACKED if "qkv_proj" in attention._modules else APART
        readers = tuple(self.child(attention, name, nn.Linear) for name in names)
        out = self.child(attention, "o_proj", nn.Linear)
        self.known |= {id(attention._modules[norm]) for norm in HEAD_NORMS if attention._modules.get(norm) is not None}
        head_dim = getattr(attention, "head_dim", 0)
        rows = self.value_rows(attention, readers, head_dim, out)
        first = self.norm(layer, TWO_NORMS[0], hidden, readers)
        names = _PACKED_MLP if "gate_up_proj" in mlp._modules else GATED_LAYERS
        *gated, down = (self.child(mlp, name, nn.Linear) for name in names)
        second = self.norm(layer, TWO_NORMS[1], hidden, tuple(gated))
        return Half(first, readers[-1], rows, out, head_dim), Half(second, gated[-1], down.in_features, down, 0)

    def value_rows(self, attention: nn.Module, readers: tuple[nn.Linear, ...], head_dim: Any, out: nn.Linear) -> int:
        """Return the number of value rows, the last output rows of the last reader."""
        name = self.names[id(attention)]
        if not isinstance(head_dim, int) or head_dim < 1 or out.in_features % head_dim:
            self.refuse(f"{name} must have a head_dim that divides the {out.in_features} inputs of o_proj")
        rows = readers[-1].out_features
        if len(readers) == 1:
            rows = (rows - out.in_features) // 2  # qkv_proj holds queries, keys and values
        if rows < head_dim or rows % head_dim or out.in_features % rows:
            self.refuse(f"{name} must have values of heads of {head_dim} that divide those of o_proj, got {rows} rows")
        return rows

    def norm(self, parent: nn.Module, name: str, hidden: int, readers: tuple[nn.Linear, ...]) -> Norm:
        module = self.child(parent, name, nn.Module)
        full, facts = self.names[id(module)], norm_facts(module)
        if facts is None or module.weight.numel() != hidden:
            self.refuse(f"{full} must be an RMSNorm of {hidden} channels, got {type(module).__name__}")
        for reader in readers:
            if reader.in_features != hidden:
                self.refuse(f"{self.names[id(reader)]} must read {hidden} channels, got {reader.in_features}")
        return Norm(module, facts["offset"], readers)

    def child(self, parent: nn.Module, name: str, kind: type[nn.Module]) -> Any:
        prefix = self.names[id(parent)]
        full, module = f"{prefix}.{name}" if prefix else name, parent._modules.get(name)
        if module is None:
            self.refuse(f"{full} must be there, got {type(parent).__name__} with {', '.join(parent._modules)}")
        return self.checked(full, module, kind)

    def checked(self, name: str, module: nn.Module, kind: type[nn.Module]) -> Any:
        """Return the module and mark it as known, after checking that its class is exactly ``kind`` and that its
        weights are readable."""
        if isinstance(module, (QuantLinear, QuantEmbedding)):
            self.refuse(f"{name} must be float, got {module.spec.name}: call {self.function} before quantize_")
        plain = type(module) is kind or kind is nn.Module or (kind is nn.Embedding and is_scaled_embedding(module))
        if not plain:
            self.refuse(f"{name} must be an nn.{kind.__name__}, got {type(module).__name__}")
        for key, weight in module._parameters.items():
            if weight is None:
                continue
            if type(weight) is not nn.Parameter:
                self.refuse(f"{name}.{key} must be a plain nn.Parameter, got {type(weight).__name__}")
            if weight.dtype not in (*FLOATS, torch.float64):
                wanted = "float32, bfloat16, float16 or float64"
                raise TypeError(f"{self.function}: {name}.{key} must be {wanted}, got {weight.dtype}")
            if weight.device.type != "cpu":
                self.refuse(f"{name}.{key} must be on the cpu, got device={str(weight.device)!r}")
        if getattr(module, "max_norm", None) is not None:
            self.refuse(f"{name} must be without max_norm, which changes its weight in every call")
        self.known.add(id(module))
        return module

    def check_hooks(self) -> None:
        for module in self.model.modules():
            if name := hooked(module, module._modules):
                prefix = self.names[id(module)]
                self.refuse(f"model must be without hooks, got one on {f'{prefix}.{name}' if prefix else name}")

    def check_parameters(self, shared: set[int]) -> None:
        """Check that each parameter belongs to exactly one known module, or at most two for those in ``shared``."""
        owners: dict[int, list[str]] = defaultdict(list)
        for prefix, module in self.model.named_modules(remove_duplicate=False):
            for key, parameter in module._parameters.items():
                name = f"{prefix}.{key}" if prefix else key
                if parameter is None:
                    continue
                if id(module) not in self.known:
                    self.refuse(f"{name} must be of a norm or linear layer that is known, got {type(module).__name__}")
                owners[id(parameter)].append(name)
        for parameter, names in owners.items():
            if len(names) > (2 if parameter in shared else 1):
                self.refuse(f"{names[0]} must belong to one layer, got {', '.join(names[1:])} too")
