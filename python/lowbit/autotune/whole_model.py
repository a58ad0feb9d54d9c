# SPDX-License-Identifier: Apache-2.0
"""The model as a whole on the example input: its error and its time with some layers replaced.

Padding does not count: where the input has an ``attention_mask`` [B, L], as models of transformers take it, tensors
[B, L, ...] are compared at the tokens that it lets through. The outputs of padding mean nothing: all-MiniLM-L6-v2 with
int8 weights and activations has 15.7 dB with them and 22.7 dB without, on 32 sentences.

The model is changed for the length of a call only, and by one attribute: ``forward`` of the instance, which is
taken away again.
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
from lowbit.autotune.options import preferring, sqnr_db
from lowbit.autotune.timing import Timed, Timer
from lowbit.quant.evaluation import arguments_of
from lowbit.quant.load_check import without_encoder_fast_path

MASK = "attention_mask"
CACHE = "past_key_values"  # the name of the cache that transformers' models return
RUNS_S = 10.0  # seconds to find out which layers the error at the output comes from
REPRODUCIBLE_DB = 20.0  # required margin between the agreement of two runs of the float model and the bound


class WholeModel:
    """A model and an example input.

    Args:
        example_input: one tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
    """

    def __init__(self, model: nn.Module, example_input: Any, timer: Timer) -> None:
        self.model, self.timer = model, timer
        self.args, self.kwargs = arguments_of(example_input)
        self.output: Any = None
        self._wanted: list[Tensor] = []
        self._run_s = 0.0
        self._last: tuple[Choice, float] | None = None  # the choice that sqnr_db was asked for last, and its result

    def run(self) -> Any:
        return self.model(*self.args, **self.kwargs)

    def run_float(self) -> None:
        """Run the model as it is and keep its result, with which others are compared."""
        start = time.perf_counter()
        self.output = self.run()
        self._run_s = time.perf_counter() - start
        self._wanted = self._tensors(self.output)

    @property
    def affordable_runs(self) -> int:
        """Runs of the model that fit into RUNS_S, 2 at least."""
        return max(2, int(RUNS_S / max(self._run_s, 1e-9)))

    @property
    def is_bounded(self) -> bool:
        """Whether it returns a floating tensor, whose error can be told."""
        return bool(self._wanted)

    def check_reproducible(self, bound_db: float) -> None:
        """Raise ValueError if a second run differs so much that the bound means nothing."""
        got = self._db(self.run())
        if not got >= bound_db + REPRODUCIBLE_DB:
            raise ValueError(
                f"autoquant: the model must return the same twice for example_input, got {got:.1f} dB between two runs "
                f"(a cache in the input that it changes, or randomness)"
            )

    def sqnr_db(self, choice: Choice) -> float:
        """The smallest SQNR of a tensor that the model returns, in dB; nan where it returns no floating one."""
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
        """The floating tensors of a model's result, but for a cache and padding."""
        if isinstance(output, Mapping):
            output = [value for name, value in output.items() if name != CACHE]
        mask = self.kwargs.get(MASK)
        found = [it.detach() for it in _pytree.tree_leaves(output) if isinstance(it, Tensor)]
        padded = isinstance(mask, Tensor) and mask.dim() == 2
        return [
            it[mask.bool()] if padded and it.shape[:2] == mask.shape else it for it in found if it.is_floating_point()
        ]

    def seconds(self, choice: Choice) -> tuple[float, float]:
        """Best seconds of a run of the float model and of the model with the choice, interleaved."""
        before = Timed(self.run, kind="before")
        after = Timed(self.run, kind="after", around=lambda: changed(self.model, choice))
        best = self.timer.best({"before": before, "after": after}, share=0.5).seconds
        return best["before"], best["after"]


@contextlib.contextmanager
def changed(model: nn.Module, choice: Choice) -> Iterator[None]:
    """Let the layers of ``model`` compute as the choice says for a while."""
    others = [(layer, option) for layer, option in choice.items() if option.spec is not None]
    served: list[nn.Module] = []
    try:
        with without_encoder_fast_path(model) if others else contextlib.nullcontext():
            for layer, option in others:
                weight = layer.pack(option.spec).weight
                for module in layer.seen.modules.values():
                    module.forward = preferring(module, weight, option.spec, option.row).forward
                    served.append(module)
            yield
    finally:
        for module in served:
            del module.forward
