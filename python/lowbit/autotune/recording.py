# SPDX-License-Identifier: Apache-2.0
"""Recording: a model that is used as usual, until `finalize` creates a plan from the inputs of its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import nn

from lowbit.autotune.plan import Plan
from lowbit.autotune.seen_layer import SeenLayer, noting


class Recording:
    """A recording of the inputs of a model's linear layers and experts, from which `finalize` creates a plan.

    The model is used as before. Calls and attributes of this object are passed on to the model, so that it can replace
    the model.

    Example:
        >>> recording = lowbit.autoquant(model, manual=True)
        >>> model.generate(**inputs)
        >>> plan = recording.finalize()
    """

    def __init__(self, model: nn.Module, layers: list[SeenLayer], make_plan: Callable[..., Plan]) -> None:
        self.model = model
        self.layers = layers
        self._make_plan = make_plan
        self._open = contextlib.ExitStack()
        self._open.enter_context(noting(model, layers))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle must not get special methods of the model
            raise AttributeError(name)
        return getattr(self.model, name)

    def finalize(self, example_input: Any = None) -> Plan:
        """Stop recording, measure the candidates on the recorded inputs, and return the plan. The model does not
        change.

        Args:
            example_input: the argument of `autoquant`, for the bound of the whole model. Without it, only the bounds of
                the layers apply, and the plan has a note about this.

        Raises:
            ValueError: no layer that can be quantized was called.
        """
        self.close()
        return self._make_plan(self.model, self.layers, example_input)

    def finalize_autoquant(self) -> Plan:
        """Call `finalize`, apply the plan to the model, and return it, like torchao's method of this name."""
        plan = self.finalize()
        plan.apply(self.model)
        return plan

    def close(self) -> None:
        """Stop recording."""
        self._open.close()
