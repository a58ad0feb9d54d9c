# SPDX-License-Identifier: Apache-2.0
"""autoquant: record the inputs of a model's linear layers, measure every candidate on them, choose.

record (recording.py) -> measure (measuring.py, timing.py, kept_times.py) -> choose (choosing.py, whole_model.py)
-> Plan (plan.py)
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lowbit.autotune.candidates import candidates_of
from lowbit.autotune.choosing import Choice, choose, never_slower
from lowbit.autotune.evaluated import Evaluated, Evaluation
from lowbit.autotune.kept_times import KeptTimes, machine
from lowbit.autotune.kv_choice import choose_cache
from lowbit.autotune.measuring import NOISY, Measuring, kinds_of, margin_of
from lowbit.autotune.options import MeasuredLayer
from lowbit.autotune.plan import Plan
from lowbit.autotune.plan_row import PlanRow
from lowbit.autotune.recording import Recording
from lowbit.autotune.rows import forced_row
from lowbit.autotune.seen_layer import SeenLayer, record
from lowbit.autotune.timing import AGREE, Timer
from lowbit.autotune.whole_model import CACHE, WholeModel
from lowbit.formats.base import FormatConfig
from lowbit.formats.float import FloatWeightConfig
from lowbit.quant.evaluation import evaluating
from lowbit.quant.kinds import features_of, is_packed, kind_of
from lowbit.quant.packing import by_weight
from lowbit.quant.quant_linear import LINEAR
from lowbit.quant.read_weights import weights_that_are_read
from lowbit.quant.select import FilterFn, reason_to_skip, select

MIN_SQNR = 20.0
"""dB: errors of a tenth of the signal, in each layer's output and in the model's. int8 weights with int8 activations
have 35 to 40 dB in a layer; int4 in groups of 32 about 20."""
MODE = ("interpolate", 0.85)


def autoquant(
    model: nn.Module,
    example_input: Any = None,
    qtensor_class_list: Sequence[Any] | None = None,
    filter_fn: FilterFn | None = None,
    mode: Sequence[Any] = MODE,
    manual: bool = False,
    set_inductor_config: bool = True,
    supress_autoquant_errors: bool = True,
    min_sqnr: float | None = MIN_SQNR,
    *,
    candidates: Sequence[FormatConfig | Any] | None = None,
    cache: str | os.PathLike[str] | bool | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    at_most: float | None = None,
) -> Plan | Recording:
    """Choose for each linear layer the format and kernel row that is fastest on this machine and exact enough.

    The model runs once on ``example_input`` to record the shapes that each layer sees. Every candidate is timed on them
    with the real packed weight, interleaved, with the caches as the model leaves them. All layers get the fastest
    format that holds ``min_sqnr`` in each of them and in the model's output; or each layer the fastest for itself, if
    that is faster by 3 % and by more than times of the same call differ. At last the whole model is timed: it is never
    slower than without the plan. The model stays as it is until ``plan.apply(model)``.

    Args:
        model: any module, in float; layers that are quantized already stay so. It is run in eval mode.
        example_input: a tensor, a tuple or list of arguments, or a mapping of keyword arguments, of the shapes that
            matter. It has to give the same result each time.
        qtensor_class_list: torchao's name of ``candidates``; its classes are understood too.
        filter_fn: called with (module, qualified name), True selects; as in `quantize_`.
        mode: torchao's ("interpolate", 0.85), which weighs two kinds of timings. Here there is one kind, so nothing
            else is taken.
        manual: return a `Recording` at once; run the model as you like, then ``recording.finalize()``.
        set_inductor_config: no effect; lowbit never changes Inductor's settings.
        supress_autoquant_errors: leave a candidate out that raises, and note it in the plan. False: let it raise.
        min_sqnr: dB that each layer's output and the model's output hold; None: no bound. With ``evaluate`` it is the
            layers' alone.
        candidates: configurations. Default: every one of `lowbit.formats.FORMATS`, bfloat16, W4A8 in groups of 128.
        cache: measured times are kept in a file. None: ``$XDG_CACHE_HOME/lowbit/autoquant.json``; a path; False: none.
        evaluate: called with the model, as it is and with formats in place of its layers, returns a figure of yours
            that is better the smaller it is: a loss, a perplexity, a KL divergence. It is called some ten to a hundred
            times, without gradients.
        at_most: the largest result of ``evaluate`` that the model with the plan may have.

    Returns:
        A `Plan`; with ``manual`` a `Recording`.

    Raises:
        ValueError: an argument has no meaning here, a row is forced (LOWBIT_KERNEL), a weight is not finite, no linear
            layer is called, two runs of the model or of ``evaluate`` differ, or the float model is above ``at_most``.
            TypeError: an argument is of another kind, or ``evaluate`` returns no number.

    Example:
        >>> plan = lowbit.autoquant(model, x)
        >>> plan.apply(model)
    """
    configs = candidates_of(candidates, qtensor_class_list)
    if not isinstance(model, nn.Module):
        raise TypeError(f"autoquant: model must be a torch.nn.Module, got {type(model).__name__}")
    _check_mode(mode)
    if min_sqnr is not None and not (isinstance(min_sqnr, (int, float)) and math.isfinite(min_sqnr)):
        raise ValueError(f"autoquant: min_sqnr must be a number of dB or None, got {min_sqnr!r}")
    if example_input is None and not manual:
        raise ValueError("autoquant: example_input must be given, or manual=True to record what you run")
    if example_input is not None and manual:
        raise ValueError("autoquant: manual=True records what you run; give example_input to finalize()")
    _check_evaluate(evaluate, at_most)
    model = getattr(model, "_orig_mod", model)  # the module in torch.compile's, whose graphs have no hooks
    maker = PlanMaker(configs, -math.inf if min_sqnr is None else float(min_sqnr), KeptTimes(cache), Timer())
    maker.raises, maker.evaluate, maker.at_most = not supress_autoquant_errors, evaluate, at_most
    layers = maker.layers_of(model, filter_fn)
    if manual:
        return Recording(model, layers, maker.plan)
    return maker.plan(model, layers, example_input, recorded=False)


def _check_mode(mode: Any) -> None:
    if mode is None or tuple(mode) != MODE:
        raise ValueError(
            f"autoquant: mode must be {list(MODE)}: it weighs two kinds of timings of torchao's, and here a call is "
            f"timed as a whole; got {mode!r}"
        )


def _check_evaluate(evaluate: Any, at_most: Any) -> None:
    if (evaluate is None) != (at_most is None):
        given, missing = ("evaluate", "at_most") if at_most is None else ("at_most", "evaluate")
        raise ValueError(f"autoquant: {missing} must be given with {given}, got None")
    if evaluate is not None and not callable(evaluate):
        raise TypeError(f"autoquant: evaluate must be called with a model, got {type(evaluate).__name__}")
    if at_most is not None and not (isinstance(at_most, (int, float)) and math.isfinite(at_most)):
        raise ValueError(f"autoquant: at_most must be a number, got {at_most!r}")


class PlanMaker:
    """Makes a plan from a recording; holds the settings that do not depend on the model."""

    def __init__(self, configs: Sequence[FormatConfig], bound_db: float, kept: KeptTimes, timer: Timer) -> None:
        self.configs, self.bound_db, self.kept, self.timer = configs, bound_db, kept, timer
        self.raises = False
        self.evaluate: Callable[[nn.Module], float] | None = None
        self.at_most: float | None = None
        self.left: dict[str, str] = {}  # layers that are not asked, and why
        self.notes: list[str] = []

    def layers_of(self, model: nn.Module, filter_fn: FilterFn | None) -> list[SeenLayer]:
        """The layers that may change, tied ones as one; every check that quantize_ would make comes here."""
        _check_no_row_is_forced()
        read = weights_that_are_read(model)

        def is_free(module: nn.Module, name: str) -> bool:
            is_one = kind_of(module) is LINEAR and not is_packed(module)
            return is_one and not reason_to_skip(module) and id(module) not in read

        selected, skipped = select(model, FloatWeightConfig(), filter_fn or is_free, None, False)
        for item in skipped:
            reason = reason_to_skip(item.module) or read.get(id(item.module)) or item.reason
            if is_packed(item.module):
                reason = f"already quantized as {item.module.spec.name}"
            self.left[item.name] = reason
        if not selected:
            raise ValueError("autoquant: model must have a linear layer that can be quantized, got none")
        return [SeenLayer({item.name: item.module for item in group}) for group in by_weight(selected)]

    @torch.no_grad()
    def plan(self, model: nn.Module, layers: list[SeenLayer], example_input: Any, recorded: bool = True) -> Plan:
        """Measure and choose. ``recorded`` False: the layers have seen nothing yet, the example is to be recorded."""
        _check_no_row_is_forced()
        whole = None if example_input is None else WholeModel(model, example_input, self.timer)
        with evaluating(model):
            if whole is not None:
                record(model, [] if recorded else layers, whole.run_float)
                whole.check_reproducible(self.bound_db)
            evaluated = None
            if self.evaluate is not None:
                evaluated = Evaluated(model, self.evaluate, float(self.at_most))
                evaluated.run_float()
            called = [layer for layer in layers if layer.calls]
            if not called:
                raise ValueError("autoquant: no linear layer of the model was called")
            measured, noise = self._measure(layers, called)
            room_db, runs = self._bound_of(whole, evaluated)
            choice = choose(measured, room_db, self.bound_db, runs, margin_of(noise))
            return self._finish(model, layers, choice, whole, evaluated, recorded)

    def _bound_of(self, whole: WholeModel | None, evaluated: Evaluated | None) -> tuple[Callable[[Choice], float], int]:
        """The function that gives a choice's distance from the model's bound, in dB, and the runs that may look
        for the reason."""
        if evaluated is not None:
            return evaluated.room_db, evaluated.affordable_runs
        if whole is None or not whole.is_bounded or self.bound_db == -math.inf:
            return lambda choice: math.inf, 0
        return lambda choice: whole.sqnr_db(choice) - self.bound_db, whole.affordable_runs

    def _measure(self, layers: list[SeenLayer], called: list[SeenLayer]) -> tuple[list[MeasuredLayer], float]:
        """Return the layers with their options, and by how much times of the same call differ; a note
        explains the consequence."""
        dtypes = {layer.module.weight.dtype for layer in called}
        specs = {dtype: list(dict.fromkeys(config.spec(dtype) for config in self.configs)) for dtype in dtypes}
        kinds = kinds_of(called)
        measuring = Measuring(layers, kinds, specs, self.timer, self.kept, self._failed)
        measured = measuring.measure(self._progress(kinds))
        if measuring.noise > AGREE:
            then = "within that, kernel rows keep their order and all layers get one format"
            if measuring.noise > NOISY:
                then = "they are taken to go by the bytes of the weights"
            self.notes.append(
                f"times of the same call differ by {measuring.noise - 1:.0%}, perhaps other programs run: {then}"
            )
        return measured, measuring.noise

    def _finish(
        self, model: nn.Module, layers: list[SeenLayer], choice: Choice, whole: WholeModel | None,
        evaluated: Evaluated | None, recorded: bool,
    ) -> Plan:  # fmt: skip
        before = after = math.nan
        cache = None
        model_db = math.nan
        if whole is None:
            bounded = "neither bounded nor timed" if evaluated is None else "not timed"
            self.notes.append(f"no example input: the model as a whole is {bounded}")
        else:
            if not whole.is_bounded:
                self.notes.append("the model returns no floating tensor: its error as a whole is not known")
            if recorded:  # the example is one of the calls that count, perhaps one that gets slower
                before, after = whole.seconds(choice)
            else:
                kept, before, after = never_slower(choice, whole.seconds)
                if kept != choice:
                    self.notes.append("the model as a whole was slower with the plan: every layer stays as it is")
                choice = kept
            model_db = whole.sqnr_db(choice)
            cache = choose_cache(getattr(whole.output, CACHE, None), self.bound_db)
        rows = {row.layer: row for layer, option in choice.items() for row in _rows_of(layer, option)}
        for seen in layers:
            for name, module in seen.modules.items():
                if name not in rows:
                    rows[name] = PlanRow.left(name, features_of(module), module.weight.nbytes, "was not called")
        for name, reason in self.left.items():
            module = model.get_submodule(name)
            rows[name] = PlanRow.left(name, features_of(module), module.weight.nbytes, reason)
        return Plan(
            rows=[rows[name] for name, _ in model.named_modules() if name in rows],
            min_sqnr=self.bound_db,
            model_db=model_db,
            float_seconds=before,
            seconds=after,
            kv_cache=cache,
            evaluation=evaluated and Evaluation(evaluated.before, evaluated.figure(choice), evaluated.at_most),
            machine=machine(),
            notes=list(dict.fromkeys(self.notes)),
        )

    def _failed(self, error: Exception, what: str) -> None:
        if self.raises:
            raise error
        self.notes.append(f"{what}: {error}")

    def _progress(self, kinds: list[list[SeenLayer]]) -> Iterable[list[SeenLayer]]:
        try:
            from tqdm.auto import tqdm
        except ImportError:
            self.notes.append("install tqdm for a progress bar")
            return kinds
        return tqdm(kinds, desc="autoquant", unit="kind of layer")


def _rows_of(layer: MeasuredLayer, option: Any) -> Iterable[PlanRow]:
    first = layer.seen.name
    for name in layer.seen.modules:
        owner = name == first
        yield PlanRow(
            layer=name,
            shape=layer.seen.features,
            calls=tuple((shape.m, shape.dtype, count) for shape, count in sorted(layer.seen.calls.items())),
            spec=option.spec,
            row=option.row,
            float_seconds=layer.as_float.seconds * owner,
            seconds=option.seconds * owner,
            error_db=layer.error_db(option),
            bytes_before=layer.as_float.bytes * owner,
            bytes_after=option.bytes * owner,
            note="" if owner else f"shares the weight of {first}",
        )


def _check_no_row_is_forced() -> None:
    if forced := forced_row():
        raise ValueError(f"autoquant: no row of linear may be forced, there would be nothing to choose; got {forced}")
