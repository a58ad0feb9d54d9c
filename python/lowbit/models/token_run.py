# SPDX-License-Identifier: Apache-2.0
"""The decoding of tokens by a program that has the layers, the last norm and the head; each token takes one run.

logits = head(norm(layers(embedding(token), cos, sin)))
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lowbit.models.croppable_states import CroppableStates
from lowbit.models.fused_attention import pair_of, whole_columns
from lowbit.models.fused_decoder import FusedDecoder, stand_ins
from lowbit.models.fused_layer import as_returned, calls_lowbit_attention
from lowbit.models.growing_cache import GrowingSlidingLayer
from lowbit.models.layer_program import NORMS, LayerProgram
from lowbit.models.steps import MISSING
from lowbit.ops.tracing import is_traced
from lowbit.quant.fused import Fused, has_hooks, is_inference, with_children
from lowbit.quant.lora_layers import is_step

AHEAD = 64  # tokens per check of the model, per batch of rotary embeddings and per reservation in the cache
_FIXED_ROPE = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings whose rows depend only on the position. Rows of others may depend on the longest sequence."""


MULTIPLIERS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "times": lambda x, number: x if number == 1.0 else x * number,  # Granite's embedding, Cohere's logits
    "divided": lambda x, number: x / number,  # Granite's logits
    "capped": lambda x, number: torch.tanh(x / number) * number,  # Gemma 2's logits
}
"""What models do to the result of their embedding or head, with a number of their configuration."""


def numbers_of(model: Any) -> list[float]:
    """Return the numbers that a model may multiply by: those other than 0 of its configuration and its attributes."""
    decoder = (child for child in model._modules.values() if isinstance(child, FusedDecoder))
    named = [model.config.__dict__, model.__dict__, *(child.__dict__ for child in decoder)]
    values = (value for names in named for name, value in sorted(names.items()))
    return [float(value) for value in values if type(value) in (int, float) and value not in (0, 1) and value == value]


def has_attention(model: Any) -> bool:
    """Whether a layer of a `FusedCausalLM` has attention, which reads masks and positions."""
    try:
        return model._modules[model.facts["decoder"]].facts["attention"] is not None
    except AttributeError:  # another thread unfused it
        return True


class TokenProgram(LayerProgram):
    """A program with the layers of a decoder, its last norm and, if it is packed, the head of the model.

    Args:
        parts: the modules of the model.
        dtype: the dtype of activations and norms.
    """

    head: nn.Module | None = None
    """The head that is the last step, if any."""

    def __init__(self, parts: Parts | None = None, dtype: torch.dtype | None = None) -> None:
        if parts is None:
            super().__init__()
        else:
            facts = parts.decoder.facts
            super().__init__(facts["layers"], facts["kinds"], dtype, parts.steps, of_token=True)

    def is_of(self, head: nn.Module) -> bool:
        """Whether the program ends with this head, or has no head if this one cannot be a step now."""
        return self.head is (head if _is_step(head) else None)


def _is_step(head: nn.Module) -> bool:
    return is_step(head) and not has_hooks(head)


class Parts:
    """The current modules of a `FusedCausalLM` that a token passes through.

    Raises:
        KeyError: a module was removed.
    """

    def __init__(self, model: Any) -> None:
        facts = model.facts
        self.decoder: Any = model._modules[facts["decoder"]]
        self.head: Any = model._modules[facts["head"]]
        self.norm_name = facts["norm"]
        self.norm: Any = self.decoder._modules[facts["norm"]]
        self.embedding: Any = self.decoder._modules[facts["embedding"]]
        self._numbers_hold = numbers_of(model) == facts["numbers"]
        self._of_embedding, self._of_logits = facts["of_embedding"], facts["of_logits"]

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of the first layer."""
        kind, number = self._of_embedding
        return MULTIPLIERS[kind](self.embedding(tokens), number)

    def logits(self, y: Tensor) -> Tensor:
        """Return the logits of the model for the result of its head."""
        kind, number = self._of_logits
        return MULTIPLIERS[kind](y, number)

    def are_plain(self) -> bool:
        """Whether none of them has hooks and the decoder still calls its layers as it did when it was fused."""
        decoder = self.decoder
        return (
            isinstance(decoder, FusedDecoder) and isinstance(self.norm, NORMS) and self._numbers_hold
            and not has_hooks(self.embedding) and decoder.hands_on(decoder.facts["layers"])
            and calls_lowbit_attention(decoder.facts["attention"])
        )  # fmt: skip

    def dtype(self) -> torch.dtype:
        """Return the dtype of the activations: that of the last norm, or of the model if it has no weight."""
        weight = next(self.norm.parameters(), None)
        return self.decoder.dtype if weight is None else weight.dtype

    def steps(self, program: TokenProgram, x: int) -> int | None:
        """Write the steps after the layers."""
        decoder, norm, head = self.decoder, self.norm, self.head
        if decoder.training or has_hooks(decoder) or has_hooks(norm) or not program.takes_norm(norm):
            return None
        program.note(decoder._modules, *decoder._modules)
        program.note(decoder.__dict__, "training", "facts", "config")
        program.note_module(decoder)
        x = program.norm(norm, program.stream(x))
        if _is_step(head):
            program.head = head
            x = program.product(head, x)
        return x


class TokenRun:
    """The decoding of one generation after its prompt.

    Args:
        model: a `FusedCausalLM`.
        cache: a DynamicCache.
        positions: int64 ``[B or 1, 1]``, the positions of the next tokens.
        mask: ``[B, S]``, nonzero for visible tokens of the cache and for the next token; None if all are visible.
        changing: whether user code may change the model between two tokens. If so, each token checks the whole model;
            if not, each token checks hooks, class and mode, and the rest is checked once per `AHEAD` tokens.
        watched: whether user code may read the cache between two tokens. If so, the cache counts each token at once.
    """

    def __init__(
        self, model: Any, cache: Any, positions: Tensor, mask: Tensor | None, changing: bool, watched: bool
    ) -> None:
        self._model, self._cache, self._positions = model, cache, positions
        self._mask = None if mask is None else mask.bool()
        self._first = 0 if mask is None else mask.shape[1]
        """The number of tokens that the first token sees."""
        self._done = 0
        """The number of tokens so far."""
        self._looks_ahead = 1 if changing else AHEAD
        self._room_ahead = 1 if watched else AHEAD
        self._parts: Any = None
        self._program = TokenProgram()
        self._seen: tuple[Any, ...] = ()
        self._checked = 0  # tokens until the next full check of the model
        self._rows: list[tuple[tuple[Tensor, Tensor], ...]] = []
        """The rotary embeddings of the next tokens for each kind of layer, in reverse order, so that the next token's
        come last."""
        self._room = self._written = 0  # tokens that still fit into the states; tokens written but not yet counted
        self._states: list[Tensor] = []
        self._starts: list[int] = []
        self._grown: Sequence[Any] = ()

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Return the logits ``[B, 1, V]`` after ``tokens [B, 1]``, or None if the model must be called for them."""
        try:
            return self._logits(tokens)
        except Exception:
            if isinstance(self._model, Fused) and (self._parts is None or isinstance(self._parts.decoder, Fused)):
                raise
        return None  # Another thread unfused the model; nothing was written.

    def _logits(self, tokens: Tensor) -> Tensor | None:
        if not (self._checked and self._seen == self._at_a_glance()) and not self._look_at_model(tokens.shape[0]):
            return None
        self._checked -= 1
        x, program = self._parts.embed(tokens), self._program
        if x.dim() != 3 or x.dtype is not program.dtype or not is_inference(x) or not x.is_contiguous():
            return None
        if not (self._rows or self._look_ahead(x)) or not (self._room or self._find_room(x)):
            return None
        written, mask, inputs = self._written, self._seen_tokens(), [x]
        for kind, (cos, sin) in enumerate(self._rows.pop()):
            inputs += (cos, sin, MISSING if kind in program.recurrent else mask)  # a new token is no padding
        if program.has_sides:
            inputs += len(inputs[1:]) * (MISSING,)
        y = program.run(self._states, inputs[: program.inputs], [start + written for start in self._starts])
        self._done += 1
        self._room -= 1
        self._written += 1
        if self._room_ahead == 1:
            self.count()
        return self._parts.logits(y if program.head is not None else self._parts.head(y))

    def skip(self) -> None:
        """Leave a token to a call of the model."""
        self.count()
        self._done += 1
        self._checked, self._rows = 0, []

    def count(self) -> None:
        """Count the written tokens in the cache."""
        if self._written:
            for layer in self._grown:
                layer.extend(self._written)
        self._room = self._written = 0

    def _at_a_glance(self) -> tuple[Any, ...]:
        """Return values that change if a hook is added, the model is unfused or set to training, or its attention is
        changed. A check of all modules for each token would slow down a small model."""
        model = self._model
        return type(model), model.training, RemovableHandle.next_id, model.config._attn_implementation

    def _look_at_model(self, batch: int) -> bool:
        """Find or write a program for the model in its current state; return whether there is one."""
        model, seen = self._model, self._at_a_glance()
        if not isinstance(model, Fused) or model.training or has_hooks(model) or is_traced():
            return False
        facts = model.facts
        try:
            self._parts = parts = Parts(model)
        except KeyError:
            return False
        if not parts.are_plain():
            return False
        dtype = parts.dtype()
        program = facts["kept"].serving(
            lambda kept: kept.serves(dtype, True) and kept.is_of(parts.head), lambda: TokenProgram(parts, dtype)
        )
        if program is not self._program:
            self.count()  # The other program may use other layers of the cache.
        self._program, self._checked, self._seen = program, self._looks_ahead, seen
        return program.run is not None and (program.merged or batch == 1)

    def _look_ahead(self, x: Tensor) -> bool:
        """Let the model compute the rotary embeddings of the next positions, if it has any; return whether they are
        usable."""
        if not self._program.rotates:
            kinds = self._parts.decoder.facts["kinds"]
            self._rows = AHEAD * [len(set(kinds)) * ((MISSING, MISSING),)]
            return True
        count = AHEAD if _is_fixed(self._parts.decoder) else 1
        positions = self._positions + torch.arange(self._done, self._done + count, device=x.device)
        pairs = rotary_embeddings(self._parts, x, positions, self._program.recurrent)
        if pairs is None:
            return False
        if self._program.half_rotary:
            pairs = [whole_columns(pair) for pair in pairs]
        columns = [zip(_by_tokens(cos), _by_tokens(sin), strict=True) for cos, sin in pairs]
        self._rows = [*zip(*columns, strict=True)][::-1]
        return True

    def _seen_tokens(self) -> Tensor:
        """Return the mask ``[B, 1, 1, S]`` of the next token."""
        if self._mask is None:
            return MISSING
        seen = self._first + self._done
        if seen > self._mask.shape[1]:
            self._mask = nn.functional.pad(self._mask, (0, AHEAD), value=True)
        return self._mask[:, None, None, :seen].contiguous()

    def _find_room(self, x: Tensor) -> bool:
        """Reserve memory for tokens in the cache; return whether the cache supports it. Only one token is reserved if
        layers have a window, which moves with each token."""
        self.count()
        windows = any(type(layer) is GrowingSlidingLayer for layer in self._cache.layers)
        if windows and self._mask is not None:
            return False
        left = (layer.left for layer in self._cache.layers if isinstance(layer, CroppableStates))
        many = 1 if windows else min(self._room_ahead, *left, AHEAD)
        places = self._program.places(x, self._cache, many)
        if places is None:
            return False
        self._grown, self._states, self._starts = places
        self._room = many
        return True


def rotary_embeddings(
    parts: Parts, x: Tensor, positions: Tensor, recurrent: Container[int] = ()
) -> list[tuple[Tensor, Tensor]] | None:
    """Return the rotary embeddings that the model passes to its layers: cos and sin ``[B, L, R]`` for each kind of
    layer, or None if they have another form. The kinds ``recurrent``, which read none, have those of another kind.

    Args:
        parts: the modules of the model.
        x: an input of the layers, of which the dtype and size are used.
        positions: int64 ``[B, L]``.
    """
    decoder, seen = parts.decoder, []
    facts = decoder.facts

    def call(_: nn.Module, x: Tensor, /, *args: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
        seen.append(pair_of(position_embeddings))
        return as_returned(x, facts["behind"][len(seen) - 1])

    twin = with_children(decoder, layers=stand_ins(call, facts["layers"]), **{parts.norm_name: _same})
    inputs = x.new_zeros(*positions.shape, x.shape[-1])
    decoder.unfused.forward(twin, inputs_embeds=inputs, position_ids=positions, use_cache=False)
    pairs = dict(zip(reversed(facts["kinds"]), reversed(seen), strict=True))  # `seen` of the first layer of each kind
    of_another = next((pair for kind, pair in pairs.items() if kind not in recurrent), None)
    of_kinds = [of_another if kind in recurrent else pairs[kind] for kind in range(len(pairs))]
    return of_kinds if all(_are_rows(pair, positions) for pair in of_kinds) else None


def _same(x: Tensor) -> Tensor:
    return x


def _are_rows(pair: Any, positions: Tensor) -> bool:
    return isinstance(pair, tuple) and [x.dim() == 3 and x.shape[:2] == positions.shape for x in pair] == [True, True]


def _by_tokens(rows: Tensor) -> tuple[Tensor, ...]:
    """Return ``[B, 1, R]`` for each token of ``rows [B, L, R]``."""
    return rows.transpose(0, 1).unsqueeze(2).contiguous().unbind()


def _is_fixed(decoder: nn.Module) -> bool:
    """Whether the rows of all rotary embeddings of the model depend only on their position."""
    kinds = [module.rope_type for module in decoder.children() if hasattr(module, "rope_type")]
    names = chain.from_iterable(kind.values() if isinstance(kind, dict) else (kind,) for kind in kinds)
    return bool(kinds) and _FIXED_ROPE.issuperset(names)
