# SPDX-License-Identifier: Apache-2.0
"""Choose one option for each layer: one format for all layers; or for each layer the fastest whose output holds the
bound, made more exact until the model holds it too, if that is faster by more than the noise of the times.

Noise adds up: the model's relative noise is about the sum of its layers' contributions, and a layer contributes its own
(10^(-dB / 10)) times a factor, which is measured. The layer that gives back the most noise for the time is moved first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lowbit.autotune.options import MeasuredLayer, Option

Choice = dict[MeasuredLayer, Option]
Factors = dict[MeasuredLayer, float]
TRIES = 3  # how often a choice that is slower than the float model is timed
_LEAST = 1e-30  # noise of a layer that is as good as none


def choose(
    layers: Sequence[MeasuredLayer], room_db: Callable[[Choice], float], bound_db: float, runs: int, margin: float
) -> Choice:
    """Return an option for each layer: one format for all, or the fastest for each if that is faster by the margin.

    Args:
        room_db: the margin in dB of the model's noise with a choice below the bound; inf where it is not known.
        bound_db: SQNR that each layer holds.
        runs: the max number of calls of ``room_db`` that find out which layers the noise comes from.
        margin: the ratio of two times from which on they differ.
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
    """The first option that holds the bound; the float layer holds every one."""
    return next(option for option in layer.options if layer.error_db(option) >= bound_db)


def more_exact(layer: MeasuredLayer, option: Option) -> list[Option]:
    """The slower options behind this one whose error is smaller."""
    noise = noise_of(layer.error_db(option))
    behind = layer.options[layer.options.index(option) + 1 :]
    return [other for other in behind if noise_of(layer.error_db(other)) < noise]


def hold_model_bound(choice: Choice, room_db: Callable[[Choice], float], runs: int) -> Choice:
    """Move layers to more exact options until the model holds its bound; at the last all layers are as they are.

    Args:
        choice: an option for each layer.
        room_db, runs: the arguments of `choose`; inf if all layers are as they are.
    """
    choice = dict(choice)
    room = room_db(choice)
    if room >= 0:
        return choice
    factors = _factors(choice, room_db, runs)
    while not room >= 0:
        part = 10 ** (room / 10) if math.isfinite(room) else 0.0
        allowed = _noise(choice, factors) * part
        while True:  # at least one, however small the estimate says that the rest is
            layer, option = _best_move(choice, factors)
            choice[layer] = option
            if _noise(choice, factors) <= allowed:
                break
        room = room_db(choice)
    return choice


def _factors(choice: Choice, room_db: Callable[[Choice], float], runs: int) -> Factors:
    """The factors of layers' noise on its way to the model's output: from runs in which only one layer is changed, or
    only it and its neighbours where layers are more than runs."""
    changed = [layer for layer, option in choice.items() if option.spec is not None]
    size = math.ceil(len(changed) / runs)
    factors: Factors = {}
    for start in range(0, len(changed), size):
        group = changed[start : start + size]
        alone = {layer: option if layer in group else layer.as_float for layer, option in choice.items()}
        own = sum(noise_of(layer.error_db(choice[layer])) for layer in group)
        factor = min(noise_of(room_db(alone)) / max(own, _LEAST), 1 / _LEAST)
        factors |= dict.fromkeys(group, factor)
    unseen = sum(factors.values()) / len(factors) / 10  # the factor of a layer with which a loss improved by chance
    return {layer: factor or unseen for layer, factor in factors.items()}


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


def one_format(layers: Sequence[MeasuredLayer], room_db: Callable[[Choice], float], bound_db: float) -> Choice:
    """Return the fastest choice of one format for all layers that holds the bounds. A layer that is slower in that
    format stays as it is; all do if none holds."""
    specs = dict.fromkeys(spec for layer in layers for spec in layer.formats)
    for choice in sorted(({layer: layer.in_format(spec) for layer in layers} for spec in specs), key=seconds_of):
        known = [layer.errors.get(option.spec, math.inf) for layer, option in choice.items()]  # others cost packing
        if not all(error_db >= bound_db for error_db in known) or not room_db(choice) >= 0:
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
    for _ in range(TRIES):  # again: another program may have slowed a run, and no layer must go back for that
        before, after = model_seconds(choice)
        if after <= before:
            return choice, before, after
    return {layer: layer.as_float for layer in choice}, before, before
