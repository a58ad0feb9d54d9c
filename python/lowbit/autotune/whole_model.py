# SPDX-License-Identifier: Apache-2.0
"""The whole model on the example input: its error and its time with some layers replaced.

Padding is ignored: if the input has an ``attention_mask`` [B, L], as in transformers, tensors [B, L, ...] are only
compared at the tokens that are not masked. The outputs for padding are meaningless: all-MiniLM-L6-v2 with int8 weights
and activations has 15.7 dB with them and 22.7 dB without them, on 32 sentences.

The model is only changed during a call, and only by an attribute ``forward`` of the layers, which is removed
afterwards.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

from lowbit.autotune.choosing import Choice
from lowbit.autotune.options import sqnr_db
from lowbit.autotune.timing import BUSY, Timed, Timer
from lowbit.quant.evaluation import arguments_of, without_encoder_fast_path

MASK = "attention_mask"
CACHE = "past_key_values"  # name of the cache that transformers' models return
RUNS_S = 10.0  # time in seconds to attribute the error of the output to layers
REPRODUCIBLE_DB = 20.0  # margin by which the SQNR between two runs of the float model must exceed the bound


class WholeModel:
    """A model and an example input.

    Args:
        model: the model.
        example_input: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        timer: the timer.
    """

    def __init__(self, model: nn.Module, example_input: Any, timer: Timer) -> None:
        self.model, self.timer = model, timer
        self.args, self.kwargs = arguments_of(example_input)
        self.output: Any = None
        self._wanted: list[Tensor] = []
        self._run_s = 0.0
        self._last: tuple[Choice, float] | None = None  # argument and result of the last call of sqnr_db

    def run(self) -> Any:
        return self.model(*self.args, **self.kwargs)

    def run_float(self) -> None:
        """Run the float model and keep its result for comparison."""
        start = time.perf_counter()
        self.output = self.run()
        self._run_s = time.perf_counter() - start
        self._wanted = self._tensors(self.output)

    @property
    def affordable_runs(self) -> int:
        """The number of runs of the model that fit into RUNS_S, at least 2."""
        return max(2, int(RUNS_S / max(self._run_s, 1e-9)))

    @property
    def is_bounded(self) -> bool:
        """Whether the model returns a floating tensor, so that its error can be computed."""
        return bool(self._wanted)

    def check_reproducible(self, bound_db: float) -> None:
        """Raise ValueError if a second run differs so much that the bound is meaningless."""
        got = self._db(self.run())
        if not got >= bound_db + REPRODUCIBLE_DB:
            raise ValueError(
                f"autoquant: the model must return the same twice for example_input, got {got:.1f} dB between two runs "
                f"(a cache in the input that it changes, or randomness)"
            )

    def sqnr_db(self, choice: Choice) -> float:
        """Return the min SQNR in dB over the tensors that the model returns; nan if none is floating."""
        if not self._wanted:
            return math.nan
        if all(option.spec is None for option in choice.values()):
            return math.inf
        if self._last is None or self._last[0] != choice:
            with changed(self.model, choice):
                self._last = choice, self._db(self.run())
        return self._last[1]

    def _db(self, output: Any) -> float:
        got = self._tensors(output)
        if [it.shape for it in got] != [it.shape for it in self._wanted]:
            return -math.inf
        values = [sqnr_db(wanted, it) for wanted, it in zip(self._wanted, got, strict=True)]
        return -math.inf if any(map(math.isnan, values)) else min(values, default=math.inf)

    def _tensors(self, output: Any) -> list[Tensor]:
        """Return the floating tensors of a model's result, without the cache and without padding."""
        if isinstance(output, Mapping):
            output = [value for name, value in output.items() if name != CACHE]
        mask = self.kwargs.get(MASK)
        found = [it.detach() for it in _pytree.tree_leaves(output) if isinstance(it, Tensor)]
        padded = isinstance(mask, Tensor) and mask.dim() == 2
        return [
            it[mask.bool()] if padded and it.shape[:2] == mask.shape else it for it in found if it.is_floating_point()
        ]

    def seconds(self, choice: Choice) -> tuple[float, float]:
        """Return the best times in seconds of the float model and of the model with the choice, from interleaved runs;
        nan if other programs took so much of the CPU time that these say nothing."""
        before = Timed(self.run, kind="before")
        after = Timed(self.run, kind="after", around=lambda: changed(self.model, choice))
        times = self.timer.best({"before": before, "after": after}, share=0.5)
        if times.taken > BUSY:
            return math.nan, math.nan
        return times.seconds["before"], times.seconds["after"]


@contextlib.contextmanager
def changed(model: nn.Module, choice: Choice) -> Iterator[None]:
    """Replace the layers of ``model`` according to the choice within the block."""
    others = [(layer, option) for layer, option in choice.items() if option.spec is not None]
    served: list[nn.Module] = []
    try:
        with without_encoder_fast_path(model) if others else contextlib.nullcontext():
            for layer, option in others:
                packed = layer.pack(option.spec)
                for module in layer.seen.modules.values():
                    module.forward = layer.seen.in_place_of(module, packed, option.spec, option.row).forward
                    served.append(module)
            yield
    finally:
        for module in served:
            del module.forward
