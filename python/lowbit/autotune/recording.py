# SPDX-License-Identifier: Apache-2.0
"""Recording: a model that is used as usual until `finalize` makes a plan from its layers' inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import nn

from lowbit.autotune.plan import Plan
from lowbit.autotune.seen_layer import SeenLayer, noting


class Recording:
    """Notes the inputs of a model's linear layers, until `finalize` measures and makes the plan.

    The model is used as before; calls and attributes of this object are the model's, so that it can stand in its place.

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
        if name.startswith("__"):  # names that copy and pickle ask for are not the model's
            raise AttributeError(name)
        return getattr(self.model, name)

    def finalize(self, example_input: Any = None) -> Plan:
        """Stop recording, measure the candidates on the recorded inputs, and return the plan; the model stays as it is.

        Args:
            example_input: the argument of `autoquant`, for the bounds of the model as a whole. None: there is no input
                that could be run again, so the layers' own bounds hold alone, and the plan says so.

        Raises:
            ValueError: no linear layer was called.
        """
        self.close()
        return self._make_plan(self.model, self.layers, example_input)

    def finalize_autoquant(self) -> Plan:
        """torchao's name: `finalize`, and apply the plan to the model, as torchao's autoquant does it."""
        plan = self.finalize()
        plan.apply(self.model)
        return plan

    def close(self) -> None:
        """Stop recording."""
        self._open.close()
