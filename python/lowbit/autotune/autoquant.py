# SPDX-License-Identifier: Apache-2.0
"""autoquant: record the inputs of a model's linear layers and experts, measure every candidate on them, and choose.

record (seen_layer.py, seen_layers.py, recording.py) -> measure (measuring.py, timing.py, kept_times.py)
-> choose (choosing.py, whole_model.py) -> Plan (plan.py)
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
from lowbit.autotune.measuring import Measuring, kinds_of, margin_of
from lowbit.autotune.options import MeasuredLayer
from lowbit.autotune.plan import Plan
from lowbit.autotune.plan_row import BY_BYTES, PlanRow
from lowbit.autotune.recording import Recording
from lowbit.autotune.rows import forced_row
from lowbit.autotune.seen_layer import SeenLayer, float_bytes_of, record
from lowbit.autotune.seen_layers import MEASURED, seen_layers
from lowbit.autotune.timing import AGREE, BUSY, Timer
from lowbit.autotune.tried_formats import TriedFormats
from lowbit.autotune.whole_model import CACHE, WholeModel
from lowbit.formats.base import FormatConfig
from lowbit.formats.float import FloatWeightConfig
from lowbit.quant.calibration import Calibration
from lowbit.quant.evaluation import evaluating
from lowbit.quant.kinds import is_packed, kind_of, shape_of
from lowbit.quant.output_head import INT8, head_layers
from lowbit.quant.read_weights import weights_that_are_read
from lowbit.quant.select import FilterFn, reason_to_skip, select

MIN_SQNR = 20.0
"""The default bound in dB for each layer's output and for the model's: the error is a tenth of the signal. A layer with
int8 weights and int8 activations has 35 to 40 dB; int4 in groups of 32 has about 20 dB."""
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
    head: FormatConfig | str | None = INT8,
    calibration: Calibration | Iterable[Any] | str | None = None,
    tokenizer: Callable[..., Any] | None = None,
) -> Plan | Recording:
    """Choose for each linear layer and module of experts the fastest format and kernel row that is accurate enough.

    The model runs once on ``example_input`` to record the input shapes of each layer. Every candidate is timed on them
    with the packed weight, in interleaved rounds, and with the CPU caches in the state that the model leaves them in.
    By default all layers get the same format: the fastest that satisfies ``min_sqnr`` for each layer's output and for
    the model's. If choosing the fastest format for each layer separately is faster by more than 3 % and by more than
    the noise of the times, that choice is used instead. Finally the whole model is timed; if it is slower with the
    plan, all layers stay float. The model is not changed before ``plan.apply(model)``.

    Args:
        model: a float model; layers that are quantized already do not change. It is run in eval mode.
        example_input: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments, with
            representative shapes. The model must return the same result for it every time.
        qtensor_class_list: torchao's name for ``candidates``; torchao's classes are accepted too.
        filter_fn: called with (module, qualified name); True selects a layer, as in `quantize_`.
        mode: must be torchao's default ("interpolate", 0.85), which weights two kinds of timings. lowbit has only one.
        manual: return a `Recording` immediately; run the model as you like, then call ``recording.finalize()``.
        set_inductor_config: no effect; lowbit never changes Inductor's settings.
        supress_autoquant_errors: whether a candidate that raises an error is omitted, with a note in the plan.
        min_sqnr: the min signal-to-noise ratio in dB of each layer's output and of the model's output; None for no
            bound. With ``evaluate`` it only applies to the layers.
        candidates: configurations to try, or their texts. None is every one in `lowbit.formats.FORMATS` except the 2:4
            sparse ones, bfloat16, and W4A8 in groups of 128.
        cache: the file in which measured times are kept. None is ``$XDG_CACHE_HOME/lowbit/autoquant.json``, with
            ``~/.cache`` as the default folder; False keeps none.
        evaluate: called with the model, in which some layers may be replaced; returns a number that is better the
            smaller it is, such as a loss, a perplexity or a KL divergence. It is called about ten to a hundred times,
            without gradients.
        at_most: the max result of ``evaluate`` for the model with the plan.
        head: the formats of a language model's output head, as in `quantize_`: with "int8", 8 bits take the place of
            candidates that have fewer. Embeddings are not measured: one that is tied to the head keeps its float
            weight.
        calibration, tokenizer: as in `quantize_`: the codes of candidates that search for scales or use `GPTQ` are
            chosen with it, and with "self" by GPTQ. ``plan.apply`` chooses the same codes.

    Returns:
        A `Plan`; with ``manual`` a `Recording`.

    Raises:
        ValueError: an argument has an unsupported value; a kernel row is forced (LOWBIT_KERNEL); a weight is not
            finite; no layer is called; two runs of the model or of ``evaluate`` differ; the result of ``evaluate`` for
            the float model is not below ``at_most``; or `quantize_` would refuse the calibration.
        TypeError: an argument is of the wrong type, or ``evaluate`` does not return a number.

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
    model = getattr(model, "_orig_mod", model)  # the original module, since torch.compile's graphs have no hooks
    formats = TriedFormats(configs, head, calibration, tokenizer)
    maker = PlanMaker(formats, -math.inf if min_sqnr is None else float(min_sqnr), KeptTimes(cache), Timer())
    maker.raises, maker.evaluate, maker.at_most = not supress_autoquant_errors, evaluate, at_most
    layers = maker.layers_of(model, filter_fn)
    if manual:
        return Recording(model, layers, maker.plan)
    return maker.plan(model, layers, example_input, recorded=False)


def _check_mode(mode: Any) -> None:
    if mode is None or tuple(mode) != MODE:
        raise ValueError(
            f"autoquant: mode must be {list(MODE)}, got {mode!r}: other modes of torchao weigh two kinds of timings, "
            "and here a call is timed as a whole"
        )


def _check_evaluate(evaluate: Any, at_most: Any) -> None:
    if (evaluate is None) != (at_most is None):
        given, missing = ("evaluate", "at_most") if at_most is None else ("at_most", "evaluate")
        raise ValueError(f"autoquant: {missing} must be given with {given}, got None")
    if evaluate is not None and not callable(evaluate):
        raise TypeError(f"autoquant: evaluate must be a function of the model, got {type(evaluate).__name__}")
    if at_most is not None and not (isinstance(at_most, (int, float)) and math.isfinite(at_most)):
        raise ValueError(f"autoquant: at_most must be a finite number, got {at_most!r}")


class PlanMaker:
    """Creates a plan from a recording. It has the settings that do not depend on the model."""

    def __init__(self, formats: TriedFormats, bound_db: float, kept: KeptTimes, timer: Timer) -> None:
        self.formats, self.bound_db, self.kept, self.timer = formats, bound_db, kept, timer
        self.raises = False
        self.evaluate: Callable[[nn.Module], float] | None = None
        self.at_most: float | None = None
        self.left: dict[str, str] = {}  # layers that are not measured, with the reasons
        self.notes: list[str] = []
        self.by_bytes = False  # whether the times of layers say nothing

    def layers_of(self, model: nn.Module, filter_fn: FilterFn | None) -> list[SeenLayer]:
        """Return the layers that may change, with tied layers as one, after all checks that quantize_ would make."""
        _check_no_row_is_forced()
        read = weights_that_are_read(model)

        def is_free(module: nn.Module, name: str) -> bool:
            is_one = kind_of(module) in MEASURED and not is_packed(module)
            return is_one and not reason_to_skip(module) and id(module) not in read

        selected, skipped = select(model, FloatWeightConfig(), filter_fn or is_free, None, False, kinds=MEASURED)
        for item in skipped:
            reason = reason_to_skip(item.module) or read.get(id(item.module)) or item.reason
            if is_packed(item.module):
                reason = f"already quantized as {item.module.spec.name}"
            self.left[item.name] = reason
        if not selected:
            raise ValueError("autoquant: model must have a linear layer that can be quantized, got none")
        heads = set(map(id, head_layers(model)))
        return seen_layers({item.name: item.module for item in selected}, heads)

    @torch.no_grad()
    def plan(self, model: nn.Module, layers: list[SeenLayer], example_input: Any, recorded: bool = True) -> Plan:
        """Measure the layers, choose formats, and return the plan.

        Args:
            model: the model.
            layers: its layers that may change.
            example_input: the argument of `autoquant`.
            recorded: whether inputs are recorded already. If False, the call with the example input is recorded.
        """
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
                raise ValueError(
                    f"autoquant: the model must call a layer that can be quantized, got {len(layers)} that it did not "
                    "call"
                )
            calibration = self.formats.calibrate(model, called)
            self.notes += [self.formats.note] * bool(self.formats.note)
            measured, noise = self._measure(layers, called)
            room_db, runs = self._bound_of(whole, evaluated)
            choice = choose(measured, room_db, self.bound_db, runs, margin_of(noise))
            plan = self._finish(model, layers, choice, whole, evaluated, recorded)
            plan.calibrated, plan.calibration = calibration is not None, calibration
            return plan

    def _bound_of(self, whole: WholeModel | None, evaluated: Evaluated | None) -> tuple[Callable[[Choice], float], int]:
        """Return a function that computes how far a choice is from the model's bound in dB, and the max number of its
        calls that may be used to attribute the error to layers."""
        if evaluated is not None:
            return evaluated.room_db, evaluated.affordable_runs
        if whole is None or not whole.is_bounded or self.bound_db == -math.inf:
            return lambda choice: math.inf, 0
        return lambda choice: whole.sqnr_db(choice) - self.bound_db, whole.affordable_runs

    def _measure(self, layers: list[SeenLayer], called: list[SeenLayer]) -> tuple[list[MeasuredLayer], float]:
        """Return the layers with their options, and the noise: the ratio by which times of the same call differ. If
        there is much noise, a note explains the consequence."""
        formats = {dtype: self.formats.of(dtype) for dtype in {layer.dtype for layer in called}}
        kinds = kinds_of(called)
        measuring = Measuring(layers, kinds, formats, self.timer, self.kept, self._failed)
        measured = measuring.measure(self._progress(kinds))
        self.by_bytes = measuring.by_bytes
        by_bytes = "they are taken to go by the bytes of the weights"
        if measuring.taken > BUSY:
            self.notes.append(
                f"times say nothing, other programs took {measuring.taken:.0%} of the CPU time: {by_bytes}"
            )
        elif measuring.noise > AGREE:
            then = "within that, kernel rows keep their order and all layers get one format"
            self.notes.append(
                f"times of the same call differ by {measuring.noise - 1:.0%}, perhaps other programs run: "
                + (by_bytes if self.by_bytes else then)
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
            if recorded:  # the recorded calls count, not this example, which may become slower
                before, after = whole.seconds(choice)
            else:
                kept, before, after = never_slower(choice, whole.seconds)
                if kept != choice:
                    self.notes.append("the model as a whole was slower with the plan: every layer stays as it is")
                choice = kept
            if math.isnan(after):
                self.notes.append("the model as a whole is not timed, as other programs took much of the CPU time")
            model_db = whole.sqnr_db(choice)
            cache = choose_cache(getattr(whole.output, CACHE, None), self.bound_db)
        rows = {row.layer: row for layer, option in choice.items() for row in _rows_of(layer, option, self.by_bytes)}
        for seen in layers:
            for name, module in seen.modules.items():
                if name not in rows:
                    rows[name] = _left(name, module, "was not called")
        for name, reason in self.left.items():
            rows[name] = _left(name, model.get_submodule(name), reason)
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
        return _counted(kinds, tqdm(total=sum(map(_layers, kinds)), desc="autoquant", unit="layer"))


def _counted(kinds: list[list[SeenLayer]], bar: Any) -> Iterable[list[SeenLayer]]:
    """Move the bar on by layers: those of a kind are measured together."""
    with bar:
        for kind in kinds:
            yield kind
            bar.update(_layers(kind))


def _layers(kind: list[SeenLayer]) -> int:
    return sum(len(seen.modules) for seen in kind)


def _left(name: str, module: nn.Module, reason: str) -> PlanRow:
    return PlanRow.left(name, shape_of(module), float_bytes_of(module), reason)


def _rows_of(layer: MeasuredLayer, option: Any, by_bytes: bool) -> Iterable[PlanRow]:
    first = layer.seen.name
    for name in layer.seen.modules:
        owner = name == first
        yield PlanRow(
            layer=name,
            shape=shape_of(layer.seen.module),
            calls=tuple((shape.m, shape.dtype, count) for shape, count in sorted(layer.seen.calls.items())),
            spec=option.spec,
            row=option.row,
            float_seconds=layer.as_float.seconds * owner,
            seconds=option.seconds * owner,
            error_db=layer.error_db(option),
            bytes_before=layer.as_float.bytes * owner,
            bytes_after=option.bytes * owner,
            note=(BY_BYTES if by_bytes else "") if owner else f"shares the weight of {first}",
        )


def _check_no_row_is_forced() -> None:
    if forced := forced_row():
        raise ValueError(f"autoquant: no row of linear may be forced, there would be nothing to choose; got {forced}")
