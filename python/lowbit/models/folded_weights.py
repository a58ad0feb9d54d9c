# SPDX-License-Identifier: Apache-2.0
"""Weight changes that preserve a model's results. The model is run with the changed weights before any is written.

In this run, each module gets its weights, changed or not, in float64 while it is called. So the check sees no rounding
of the model's dtype, and only one module's weights are held in memory twice.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.quant.evaluation import evaluating

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2}
"""The max difference of the logits, relative to their size, by the dtype of the run. It is this large because the norms
of transformers compute in float32 in both cases. If the model connects its modules in another way, the difference is
about 1."""
_TOKENS = (2, 16)


class Changes:
    """New values of parameters, each given as a function of the old value in float64. Several changes of one parameter
    are applied in order."""

    def __init__(self) -> None:
        self.of: dict[nn.Module, dict[str, list[Callable[[Tensor], Tensor]]]] = defaultdict(lambda: defaultdict(list))

    def add(self, module: nn.Module, key: str, change: Callable[[Tensor], Tensor]) -> None:
        """Register a change of this parameter. Nothing happens if the module does not have it (a bias)."""
        if module._parameters.get(key) is not None:
            self.of[module][key].append(change)

    def add_to_last_rows(self, module: nn.Module, count: int, change: Callable[[Tensor], Tensor]) -> None:
        """Register a change of the last ``count`` rows of the weight ``[n, k]`` and of the bias ``[n]``."""

        def of_all(rows: Tensor) -> Tensor:
            return torch.cat((rows[:-count], change(rows[-count:])))

        for key in ("weight", "bias"):
            self.add(module, key, of_all)

    def value(self, module: nn.Module, key: str) -> Tensor:
        """Return the new value of the parameter in float64, or the parameter itself if it does not change."""
        value = module._parameters[key].detach()
        for change in self.of.get(module, {}).get(key, ()):
            value = change(value.double())
        return value

    def make(self) -> None:
        """Apply all changes in place.

        Parameters stay the same objects. A parameter that two modules share is split if the changes of the two differ.
        Each old value is freed at once, so the changes cannot be undone.
        """
        shared = defaultdict(list)
        for module, keys in self.of.items():
            for key in keys:
                shared[id(module._parameters[key])].append((module, key))
        for places in shared.values():
            first, *others = places
            for module, key in others:  # before the shared parameter is overwritten
                old = module._parameters[key]
                if not self._alike(first, (module, key)):
                    new = self.value(module, key).to(old.dtype)
                    module._parameters[key] = nn.Parameter(new, requires_grad=old.requires_grad)
            module, key = first
            parameter = module._parameters[key]
            parameter.data, parameter.grad = self.value(module, key).to(parameter.dtype), None

    def _alike(self, one: tuple[nn.Module, str], other: tuple[nn.Module, str]) -> bool:
        return self.of[one[0]][one[1]] == self.of[other[0]][other[1]]


def make_checked(function: str, model: nn.Module, words: int, changes: Changes) -> float:
    """Apply the changes if the logits for random tokens stay the same with them.

    Args:
        function: the name of the public function, for errors.
        model: the model to change.
        words: the vocabulary size.
        changes: the changes to apply.

    Returns:
        The relative difference of the logits after the changes, with the weights rounded to their own dtype.

    Raises:
        ValueError: the logits differ, the model does not run, or a new value is not finite in the dtype of its
            parameter.
    """
    for dtype in TOLERANCE:
        try:
            wanted = _logits_in(model, words, dtype)
            break
        except Exception as error:  # any exception of the caller's model; some cannot run in float64
            if dtype is torch.float32:
                raise ValueError(f"{function}: model must give logits for random tokens, got {error}") from error
    if not wanted.isfinite().all():
        raise ValueError(f"{function}: logits of the model must be finite, got inf or nan")
    difference = _relative(_logits_in(model, words, dtype, changes, function), wanted)
    if not difference <= TOLERANCE[dtype]:
        raise ValueError(
            f"{function}: model must compute the same with the new weights, got logits that differ by {difference:.1e} "
            "of their size: its pieces are put together otherwise than those of Llama; nothing was changed"
        )
    changes.make()
    return _relative(_logits_in(model, words, dtype), wanted)


def _relative(got: Tensor, wanted: Tensor) -> float:
    """Return the root mean square of the difference, relative to the standard deviation of ``wanted``."""
    return float((got - wanted).norm() / (wanted - wanted.mean()).norm().clamp_min(1e-300))


@torch.no_grad()
def _logits_in(
    model: nn.Module, words: int, dtype: torch.dtype, changes: Changes | None = None, function: str = ""
) -> Tensor:
    """Return the logits for random tokens, computed in ``dtype`` with the changes."""
    generator = torch.Generator("cpu").manual_seed(0)
    tokens = torch.randint(0, words, _TOKENS, generator=generator, device="cpu")
    with evaluating(model), _computing_in(model, dtype, changes or Changes(), function):
        return model(tokens, use_cache=False).logits.double()


@contextlib.contextmanager
def _computing_in(model: nn.Module, dtype: torch.dtype, changes: Changes, function: str) -> Iterator[None]:
    """Give each module parameters of ``dtype`` while it is called."""
    own: dict[nn.Module, dict[str, nn.Parameter]] = {}
    names = {module: name for name, module in model.named_modules()}

    def widen(module: nn.Module, args: Any) -> None:
        own[module] = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
        for key, parameter in own[module].items():
            value = changes.value(module, key)
            if function and not value.to(parameter.dtype).isfinite().all():
                name = f"{names[module]}.{key}"
                raise ValueError(f"{function}: the new {name} must be finite in {parameter.dtype}, got inf or nan")
            module._parameters[key] = nn.Parameter(value.to(dtype), requires_grad=False)

    def give_back(module: nn.Module, *_: Any) -> None:
        module._parameters.update(own.pop(module, {}))

    handles = []
    try:
        for module in names:
            if any(parameter is not None for parameter in module._parameters.values()):
                handles += (module.register_forward_pre_hook(widen), module.register_forward_hook(give_back))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in list(own):
            give_back(module)
