# SPDX-License-Identifier: Apache-2.0
"""Choice of an option for each layer.

The default is the fastest format for all layers. The alternative is the fastest option that satisfies the bound for
each layer; options are replaced by more exact ones until the model satisfies its bound too. The alternative is used if
it is faster by more than the noise of the times.

Errors add up: the relative noise of the model's output is about the sum of the layers' contributions. A layer
contributes its own noise (10^(-dB / 10)) times a factor, which is measured. The layer whose replacement removes the
most noise per second of additional time is changed first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lowbit.autotune.options import MeasuredLayer, Option

Choice = dict[MeasuredLayer, Option]
Factors = dict[MeasuredLayer, float]
TRIES = 3  # number of times that a choice slower than the float model is timed
_LEAST = 1e-30  # min noise of a layer, to avoid divisions by zero


def choose(
    layers: Sequence[MeasuredLayer], room_db: Callable[[Choice], float], bound_db: float, runs: int, margin: float
) -> Choice:
    """Return an option for each layer: one format for all, or the fastest for each if that is faster by the margin.

    Args:
        layers: the measured layers.
        room_db: function that returns for a choice how far the model's noise is below the bound, in dB; inf if unknown.
        bound_db: the min SQNR of each layer in dB.
        runs: the max number of calls of ``room_db`` that may be used to attribute the noise to layers.
        margin: the min ratio of two times that counts as a difference.
    """
    single = one_format(layers, room_db, bound_db)
    limit = seconds_of(single) / margin
    if sum(layer.options[0].seconds for layer in layers) > limit:
        return single
    mixed = {layer: fastest_within(layer, bound_db) for layer in layers}
    if seconds_of(mixed) <= limit:
        mixed = hold_model_bound(mixed, room_db, runs)
    return mixed if seconds_of(mixed) <= limit else single


def fastest_within(layer: MeasuredLayer, bound_db: float) -> Option:
    """Return the fastest option that satisfies the bound. The float layer satisfies every bound."""
    return next(option for option in layer.options if layer.error_db(option) >= bound_db)


def more_exact(layer: MeasuredLayer, option: Option) -> list[Option]:
    """Return the slower options with a smaller error than this one."""
    noise = noise_of(layer.error_db(option))
    behind = layer.options[layer.options.index(option) + 1 :]
    return [other for other in behind if noise_of(layer.error_db(other)) < noise]


def hold_model_bound(choice: Choice, room_db: Callable[[Choice], float], runs: int) -> Choice:
    """Replace options by more exact ones until the model satisfies its bound. In the worst case all layers stay float.

    Args:
        choice: an option for each layer.
        room_db, runs: the arguments of `choose`. room_db returns inf if all layers are float.
    """
    choice = dict(choice)
    room = room_db(choice)
    if room >= 0:
        return choice
    factors = _factors(choice, room_db, runs)
    while not room >= 0:
        part = 10 ** (room / 10) if math.isfinite(room) else 0.0
        allowed = _noise(choice, factors) * part
        while True:  # replaces at least one option, even if the estimate says that the bound is satisfied
            layer, option = _best_move(choice, factors)
            choice[layer] = option
            if _noise(choice, factors) <= allowed:
                break
        room = room_db(choice)
    return choice


def _factors(choice: Choice, room_db: Callable[[Choice], float], runs: int) -> Factors:
    """Return the factor between each layer's noise and its contribution to the model's noise. It is measured in runs in
    which a single layer is changed, or a group of consecutive layers if there are more layers than runs."""
    changed = [layer for layer, option in choice.items() if option.spec is not None]
    size = math.ceil(len(changed) / runs)
    factors: Factors = {}
    for start in range(0, len(changed), size):
        group = changed[start : start + size]
        alone = {layer: option if layer in group else layer.as_float for layer, option in choice.items()}
        own = sum(noise_of(layer.error_db(choice[layer])) for layer in group)
        factor = min(noise_of(room_db(alone)) / max(own, _LEAST), 1 / _LEAST)
        factors |= dict.fromkeys(group, factor)
    unseen = sum(factors.values()) / len(factors) / 10  # for layers with which the loss improved by chance
    return {layer: factor or unseen for layer, factor in factors.items()}


def _best_move(choice: Choice, factors: Factors) -> tuple[MeasuredLayer, Option]:
    """Return the replacement that removes the most noise per second of additional time."""
    moves = [(layer, option, to) for layer, option in choice.items() for to in more_exact(layer, option)]

    def worth(move: tuple[MeasuredLayer, Option, Option]) -> float:
        layer, option, to = move
        won = noise_of(layer.error_db(option)) - noise_of(layer.error_db(to))
        return factors[layer] * won / max(to.seconds - option.seconds, 1e-9)

    layer, _, to = max(moves, key=worth)
    return layer, to


def noise_of(error_db: float) -> float:
    """Return the noise-to-signal ratio of an SQNR in dB; inf for nan, which means that the output is not finite."""
    return math.inf if math.isnan(error_db) else 10 ** (-error_db / 10)


def _noise(choice: Choice, factors: Factors) -> float:
    return sum(factors.get(layer, 0.0) * noise_of(layer.error_db(option)) for layer, option in choice.items())


def one_format(layers: Sequence[MeasuredLayer], room_db: Callable[[Choice], float], bound_db: float) -> Choice:
    """Return the fastest choice with one format for all layers that satisfies the bounds. Layers that are slower in
    this format stay float. If no format satisfies the bounds, all layers stay float."""
    specs = dict.fromkeys(spec for layer in layers for spec in layer.formats)
    for choice in sorted(({layer: layer.in_format(spec) for layer in layers} for spec in specs), key=seconds_of):
        known = [layer.errors.get(option.spec, math.inf) for layer, option in choice.items()]  # others need packing
        if not all(error_db >= bound_db for error_db in known) or not room_db(choice) >= 0:
            continue
        if all(layer.error_db(option) >= bound_db for layer, option in choice.items()):
            return choice
    return {layer: layer.as_float for layer in layers}


def seconds_of(choice: Choice) -> float:
    """Return the time of all layers in a run of the model, in seconds."""
    return sum(option.seconds for option in choice.values())


def never_slower(choice: Choice, model_seconds: Callable[[Choice], tuple[float, float]]) -> tuple[Choice, float, float]:
    """Return the choice, or the float layers if the model is slower with the choice, and the times before and after.

    Args:
        choice: an option for each layer.
        model_seconds: function that returns the seconds of the float model and of the model with a choice, measured in
            interleaved runs; nan if they are not known.
    """
    for _ in range(TRIES):  # repeated, because another program may have slowed down a run
        before, after = model_seconds(choice)
        if not after > before:
            return choice, before, after
    return {layer: layer.as_float for layer in choice}, before, before
