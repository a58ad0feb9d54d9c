# SPDX-License-Identifier: Apache-2.0
"""The formats that autoquant tries, and the calibration with which it chooses their codes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowbit.autotune.seen_layer import SeenLayer
from lowbit.formats.algorithms import GPTQ
from lowbit.formats.base import FormatConfig
from lowbit.formats.spec import LinearSpec
from lowbit.quant.calibration import Calibration, calibration_of
from lowbit.quant.output_head import head_config
from lowbit.quant.own_text import gptq_of_own_text, is_own_text, told_of_own_text


class TriedFormats:
    """The formats to try.

    Args:
        configs: the configurations.
        head, calibration, tokenizer: the arguments of `autoquant`.
    """

    def __init__(
        self,
        configs: Sequence[FormatConfig],
        head: FormatConfig | str | None,
        calibration: Calibration | Iterable[Any] | str | None = None,
        tokenizer: Callable[..., Any] | None = None,
    ) -> None:
        if tokenizer is not None and calibration is None:
            raise ValueError("autoquant: tokenizer must be None without calibration=texts, got calibration=None")
        self.configs, self.given, self.tokenizer = configs, calibration, tokenizer
        self._of_head = [head_config("autoquant", head, config) or config for config in configs]
        self._algorithm: GPTQ | None = None
        self.note = ""

    def of(self, dtype: torch.dtype) -> Mapping[LinearSpec, LinearSpec]:
        """Return the formats for weights of this dtype, each with the one that the output head gets in its place."""
        pairs = zip(self.configs, self._of_head, strict=True)
        return {self._spec(config, dtype): self._spec(of_head, dtype) for config, of_head in pairs}

    def _spec(self, config: FormatConfig, dtype: torch.dtype) -> LinearSpec:
        spec = config.spec(dtype)
        return spec if self._algorithm is None else spec.with_gptq(self._algorithm)

    def calibrate(self, model: nn.Module, called: Sequence[SeenLayer]) -> Calibration | None:
        """Return the calibration of the called layers, which use it from now on; None if none was asked for.

        Raises:
            ValueError: it does not cover these layers, or has no use with these formats.
        """
        if self.given is None:
            return None
        self.note = "calibrated on the given inputs"
        if is_own_text(self.given):
            self.note = f"calibrated on {told_of_own_text(model)}"
            self._algorithm = gptq_of_own_text(model)
        selected = []
        for seen in called:
            formats = self.of(seen.dtype)
            most = min(formats.values() if seen.is_head else formats, key=_needs)
            selected += [item for weight in seen.weights.values() for item in seen.selected(weight, most)]
        told = ", ".join(map(str, self.configs))
        calibration = calibration_of(model, self.given, told, selected, self.tokenizer)
        for seen in called:
            seen.calibration = calibration
        return calibration


def _needs(spec: LinearSpec) -> int:
    """Return a sort key by which formats that need more of a calibration come first."""
    return 0 if isinstance(spec.algorithm, GPTQ) else 1 if spec.weighs_inputs else 2
