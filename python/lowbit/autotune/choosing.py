# SPDX-License-Identifier: Apache-2.0
"""Choose one option for each layer: one format for all layers, or for each the fastest whose output holds the bound,
then so that the model holds it too, if that is faster by more than the times differ anyway.

Noise adds up: the model's relative noise is about the sum of what the layers bring to it, and a layer brings its own
(10^(-dB / 10)) times a factor, which is measured. The layer is moved first that gives back the most noise for the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lowbit.autotune.options import MeasuredLayer, Option

Choice = dict[MeasuredLayer, Option]
Factors = dict[MeasuredLayer, float]
TRIES = 3  # how often a choice is timed that is slower than the float model
_LEAST = 1e-30  # noise of a layer that is as good as none


def choose(
    layers: Sequence[MeasuredLayer], model_db: Callable[[Choice], float], bound_db: float, runs: int, margin: float
) -> Choice:
    """Return an option for each layer: one format for all, or the fastest for each if that is faster by the margin.

    Args:
        model_db: SQNR of the model's output with a choice, in dB; inf where it is not known.
        bound_db: what each layer and the model hold.
        runs: how many calls of ``model_db`` may find out which layers the noise comes from.
        margin: the ratio of two times from which on they differ.
    """
    single = one_format(layers, model_db, bound_db)
    limit = seconds_of(single) / margin
    if sum(layer.options[0].seconds for layer in layers) > limit:
        return single
    mixed = {layer: fastest_within(layer, bound_db) for layer in layers}
    if seconds_of(mixed) <= limit:
        mixed, _ = hold_model_bound(mixed, model_db, bound_db, runs)
    return mixed if seconds_of(mixed) <= limit else single


def fastest_within(layer: MeasuredLayer, bound_db: float) -> Option:
    """The first option that holds the bound; the float layer holds every one."""
    return next(option for option in layer.options if layer.error_db(option) >= bound_db)


def more_exact(layer: MeasuredLayer, option: Option) -> list[Option]:
    """The options behind this one, slower, whose error is smaller."""
    noise = noise_of(layer.error_db(option))
    behind = layer.options[layer.options.index(option) + 1 :]
    return [other for other in behind if noise_of(layer.error_db(other)) < noise]


def hold_model_bound(
    choice: Choice, model_db: Callable[[Choice], float], bound_db: float, runs: int
) -> tuple[Choice, float]:
    """Move layers to more exact options until the model holds the bound.

    Args:
        choice: an option for each layer.
        model_db: SQNR of the model's output with a choice, in dB; inf if all layers are as they are.
        runs: how many calls of ``model_db`` may find out which layers the noise comes from.

    Returns:
        The choice that holds it, and its SQNR: inf once all layers are as they are.
    """
    choice = dict(choice)
    measured = model_db(choice)
    if measured >= bound_db:
        return choice, measured
    factors = _factors(choice, model_db, runs)
    while not measured >= bound_db:
        part = 10 ** ((measured - bound_db) / 10) if math.isfinite(measured) else 0.0
        allowed = _noise(choice, factors) * part
        while True:  # at least one, however small the estimate says that the rest is
            layer, option = _best_move(choice, factors)
            choice[layer] = option
            if _noise(choice, factors) <= allowed:
                break
        measured = model_db(choice)
    return choice, measured


def _factors(choice: Choice, model_db: Callable[[Choice], float], runs: int) -> Factors:
    """What a layer's noise is multiplied by on its way to the model's output: from runs in which only it is changed, or
    only it and its neighbours where layers are more than runs."""
    changed = [layer for layer, option in choice.items() if option.spec is not None]
    size = math.ceil(len(changed) / runs)
    factors: Factors = {}
    for start in range(0, len(changed), size):
        group = changed[start : start + size]
        alone = {layer: option if layer in group else layer.as_float for layer, option in choice.items()}
        own = sum(noise_of(layer.error_db(choice[layer])) for layer in group)
        factor = min(noise_of(model_db(alone)) / max(own, _LEAST), 1 / _LEAST)
        factors |= dict.fromkeys(group, factor)
    return factors


def _best_move(choice: Choice, factors: Factors) -> tuple[MeasuredLayer, Option]:
    """The move that takes back the most noise for a second."""
    moves = [(layer, option, to) for layer, option in choice.items() for to in more_exact(layer, option)]

    def worth(move: tuple[MeasuredLayer, Option, Option]) -> float:
        layer, option, to = move
        won = noise_of(layer.error_db(option)) - noise_of(layer.error_db(to))
        return factors[layer] * won / max(to.seconds - option.seconds, 1e-9)

    layer, _, to = max(moves, key=worth)
    return layer, to


def noise_of(error_db: float) -> float:
    """Noise to signal of an SQNR; of nan, a layer whose output is not finite, infinite."""
    return math.inf if math.isnan(error_db) else 10 ** (-error_db / 10)


def _noise(choice: Choice, factors: Factors) -> float:
    return sum(factors.get(layer, 0.0) * noise_of(layer.error_db(option)) for layer, option in choice.items())


def one_format(layers: Sequence[MeasuredLayer], model_db: Callable[[Choice], float], bound_db: float) -> Choice:
    """Return the fastest choice of one format for all layers that holds the bounds. A layer that is slower in that
    format stays as it is; all do if none holds."""
    specs = dict.fromkeys(spec for layer in layers for spec in layer.formats)
    for choice in sorted(({layer: layer.in_format(spec) for layer in layers} for spec in specs), key=seconds_of):
        known = [layer.errors.get(option.spec, math.inf) for layer, option in choice.items()]  # others cost packing
        if not all(error_db >= bound_db for error_db in known) or not model_db(choice) >= bound_db:
            continue
        if all(layer.error_db(option) >= bound_db for layer, option in choice.items()):
            return choice
    return {layer: layer.as_float for layer in layers}


def seconds_of(choice: Choice) -> float:
    """Seconds of all layers in a run of the model."""
    return sum(option.seconds for option in choice.values())


def never_slower(choice: Choice, model_seconds: Callable[[Choice], tuple[float, float]]) -> tuple[Choice, float, float]:
    """Return the choice, or that of all layers as they are if the model is slower with it; and both times.

    Args:
        model_seconds: seconds of the float model and of the model with a choice, measured against each other.
    """
    for _ in range(TRIES):  # again, before layers go back for what another program did
        before, after = model_seconds(choice)
        if after <= before:
            return choice, before, after
    return {layer: layer.as_float for layer in choice}, before, before
