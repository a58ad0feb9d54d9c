# SPDX-License-Identifier: Apache-2.0
"""decode over float keys and codes, and QuantizedKVCache as a sequence of operations, against the codes in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tests import internals
from tests.settings import ambient
from torch import Tensor

import lowbit
from lowbit.reference import decode as reference

from .compare import UNIT, Wrong, within

_INT16 = 2.0**-16  # a probability or a query as int16: half a step of largest / 32767


def decode(
    q: Tensor, k: Tensor, v: Tensor, *, codes: str = "", memory: str = "head-major", expanded: str = "", shared: bool = False, under: str = "",
    **options: Any,
) -> None:  # fmt: skip
    """internals.decode over keys and values as they are, or quantized into int8 or int4 codes in this order of memory.

    ``expanded``: a dimension (tokens or heads) of which all are one, with stride 0; "codes": the codes of the tokens alone, their scales
    differ. ``shared``: the codes are written into a
    copy-on-write clone, whose original must not change.
    """
    e, ev = k.shape[-1], v.shape[-1]
    call, rotated = dict(options), codes == "int4"
    if not codes:
        stored = {"k": k, "v": v}
        wide_k, wide_v, wide_q = k.double(), v.double(), q.double()
    else:
        how = (memory, expanded, shared)
        stored = _stored(k, "k", codes, rotated, *how) | _stored(v, "v", codes, False, *how)
        wide_k = reference.decoded(stored["k"], stored["k_scale"])
        wide_v = reference.decoded(stored["v"], stored["v_scale"])[..., :ev]
        wide_q = reference.rotate(q) if rotated else reference.pad(q.double())
        call["rotated"] = rotated
    scale = call.pop("scale", 1 / math.sqrt(e))
    exact = {name: value for name, value in options.items() if name in ("causal", "position", "window", "mask", "sink")}
    wanted, lse, p = reference.decode(wide_q, wide_k, wide_v, scale, **exact)
    wanted = torch.where((lse == -math.inf)[..., None], 0.0, wanted)
    out, got_lse = torch.full((*q.shape[:3], ev), 7.0, dtype=q.dtype), torch.full(q.shape[:3], 7.0)
    with ambient(under):
        internals.decode(q, stored.pop("k"), stored.pop("v"), out, scale, lse=got_lse, **stored, **call)
    row = _row_error(wide_q, wide_k, scale, e, bool(codes), exact.get("mask"))
    if exact.get("mask") is not None and exact["mask"].dtype != torch.bool:  # beyond 1e17 float64 loses the scores too
        lost = exact["mask"].abs().nan_to_num(0, 0, 0).amax(-1) >= 1e17
        row = torch.where(lost, 0.0, row)
    _compare(out, got_lse, wanted, lse, wide_v, row, bool(codes), q.dtype)


def _stored(
    x: Tensor, name: str, kind: str, rotate: bool, memory: str, expanded: str, shared: bool
) -> dict[str, Tensor]:
    made = x[:, :, :1] if expanded == "tokens" else x[:, :1] if expanded == "heads" else x
    batch, heads, length, columns = made.shape
    padded = -(-columns // 32) * 32
    sizes = (padded, 1) if kind == "int8" else (padded // 2, padded // 32)
    dtypes = (torch.int8, torch.float32) if kind == "int8" else (torch.uint8, torch.float16)
    order = (batch, length, heads) if memory == "token-major" else (batch, heads, length)
    stored = [torch.zeros(*order, size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    stored = [tensor.transpose(1, 2) for tensor in stored] if memory == "token-major" else stored
    originals = stored if shared else []
    stored = [torch._lazy_clone(tensor) for tensor in originals] or stored
    torch.ops.lowbit.kv_quantize_(made.contiguous(), *stored, rotate)
    for original in originals:
        if original.any():
            raise Wrong("kv_quantize_ into a copy-on-write clone changed its original")
    back = reference.decoded(*stored)
    back = back[..., :columns] if not rotate else back
    exact = reference.rotate(made) if rotate else made.double()
    spread = reference.decoded(*stored).shape[-1] // stored[1].shape[-1]
    step = stored[1].double().repeat_interleave(spread, -1)[..., : exact.shape[-1]]
    steps = 0.52 if kind == "int8" else 1.02  # int4 has -8 and no 8
    within(back, exact, step.abs() * steps + 2.0**-10 * exact.abs() + 1e-6, f"codes of {name}")
    if expanded == "codes":
        stored[0] = stored[0][:, :, :1]
    return {name: stored[0].expand(*x.shape[:3], -1), f"{name}_scale": stored[1].expand(*x.shape[:3], -1)}


def _row_error(q: Tensor, k: Tensor, scale: float, e: int, codes: bool, mask: Tensor | None) -> Tensor:
    k = k.abs().repeat_interleave(q.shape[1] // k.shape[1], 1)
    magnitude = (q.abs() @ k.transpose(-1, -2)).amax(-1) * abs(scale)
    row = (e + 40) * 2.0**-24 * magnitude
    if mask is not None and mask.dtype != torch.bool:
        row = row + 8 * 2.0**-24 * mask.double().abs().nan_to_num(0, 0, 0).amax(-1)
    return row + _INT16 * q.abs().amax(-1) * k.sum(-1).amax(-1)[..., None] * abs(scale) if codes else row


def _compare(
    out: Tensor, got_lse: Tensor, wanted: Tensor, lse: Tensor, v: Tensor, row: Tensor, codes: bool, dtype: torch.dtype
) -> None:
    keys, largest = v.shape[2], float(v.abs().amax())
    allowed = (2 * row.clamp(max=1) + (keys + 32) * 2.0**-24 + (2 * _INT16 * keys if codes else 0)) * largest
    allowed = allowed[..., None]
    within(out, wanted, allowed + UNIT[dtype] * (wanted.abs() + allowed) + 1e-7, "out")
    size = lse.abs().nan_to_num(0, 0, 0)
    within(got_lse, lse, row + (keys + 32) * 2.0**-24 + 4 * 2.0**-24 * size + (2 * _INT16 if codes else 0), "lse")


def cache(format: str, operations: Sequence[tuple[Any, ...]], layers: int = 2) -> None:
    """Run operations on a QuantizedKVCache: each does what it should, or raises and changes nothing.

    ("append", layer, key, value), ("attend", layer, query, options), ("crop", length), ("reorder", index). Beside each layer, its
    content is kept as float keys and values.
    """
    made = lowbit.QuantizedKVCache(format)
    held: list[tuple[Tensor, Tensor] | None] = [None] * layers
    for number, (name, *arguments) in enumerate(operations):
        what = f"operation {name}"
        before, works = _contents(made), _should_work(held, name, arguments, len(made.layers))
        try:
            _apply(made, held, name, arguments, what)
            if not works:
                raise Wrong(f"{what} was accepted")
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            if works:
                raise Wrong(f"{what} was refused: {error}") from error
            _same(before, _contents(made), f"after a refused {name}, operation {number}")


def _apply(made: Any, held: list[Any], name: str, arguments: list[Any], what: str) -> None:
    if name == "append":
        layer, key, value = arguments
        made.append(layer, key, value)
        old = held[layer]
        held[layer] = (key, value) if old is None else (torch.cat([old[0], key], 2), torch.cat([old[1], value], 2))
    elif name == "crop":
        made.crop(arguments[0])
        for layer, pair in enumerate(held):
            if pair is not None:
                keep = arguments[0] if arguments[0] >= 0 else pair[0].shape[2] + arguments[0]
                held[layer] = tuple(tensor[:, :, :keep] for tensor in pair)
    elif name == "reorder":
        made.reorder(arguments[0])
        held[:] = [None if pair is None else tuple(tensor[arguments[0]] for tensor in pair) for pair in held]
    else:
        layer, query, options = arguments
        out = made.attend(layer, query, **options)
        if held[layer] is None or held[layer][0].shape[2] == 0:
            return
        _attended(made, layer, query, out, held[layer], options)
    for layer, pair in enumerate(held[: len(made.layers)]):
        if pair is not None and made.layers[layer].length != pair[0].shape[2]:
            raise Wrong(f"{what}: a layer holds {made.layers[layer].length} tokens, wanted {pair[0].shape[2]}")


def _should_work(held: list[Any], name: str, arguments: list[Any], made: int) -> bool:
    if name == "append":
        layer, key, value = arguments
        good = key.shape[:3] == value.shape[:3] and 1 <= key.shape[3] <= 512 and 1 <= value.shape[3] <= 512
        old = held[layer]
        fits = [a.shape[:2] == b.shape[:2] and a.shape[3] == b.shape[3] for a, b in zip(old or (), (key, value))]
        return good and all(fits)
    if name == "crop":
        lengths = [0 if pair is None else pair[0].shape[2] for pair in held[:made]]
        return all(abs(arguments[0]) <= length for length in lengths)
    if name == "attend":
        pair, query = held[arguments[0]], arguments[1]
        heads = 0 if pair is None else pair[0].shape[1]
        grouped = query.shape[1] % heads == 0 if heads else query.shape[1] == 0
        return pair is not None and pair[0].shape[::3] == query.shape[::3] and grouped  # batch and head dimension
    return all(pair is None or int(arguments[0].max()) < pair[0].shape[0] for pair in held)


def _attended(
    made: Any, layer: int, query: Tensor, out: Tensor, pair: tuple[Tensor, Tensor], options: dict[str, Any]
) -> None:
    cached = made.layers[layer]
    keys, values = cached.keys().double(), cached.values().double()
    length = keys.shape[2]
    position = length - query.shape[2]
    exact = {"causal": options.get("causal", True), "position": position, "window": options.get("window", 0)}
    if options.get("mask") is not None:
        exact["mask"] = options["mask"].expand(*query.shape[:3], length)
    scale = 1 / math.sqrt(query.shape[-1])
    wanted, lse, _ = reference.decode(query.double(), keys, values, scale, **exact)
    wanted = torch.where((lse == -math.inf)[..., None], 0.0, wanted)
    row = _row_error(query.double(), keys, scale, query.shape[-1], True, None) * 4
    allowed = (2 * row.clamp(max=1) + (length + 32) * 2.0**-24 + 4 * _INT16 * length) * float(values.abs().amax())
    allowed = allowed[..., None]
    within(out, wanted, allowed + UNIT[query.dtype] * (wanted.abs() + allowed) + 1e-6, "attend")


def _contents(made: Any) -> list[Any]:
    def of(layer: Any) -> Any:
        return None if layer.shape is None else (layer.shape, layer.keys().clone(), layer.values().clone())

    return [of(layer) for layer in made.layers]


def _same(before: list[Any], after: list[Any], what: str) -> None:
    after = after[: len(before)] + [layer for layer in after[len(before) :] if layer is not None]
    if len(before) != len(after):
        raise Wrong(f"{what}: a layer is there that was not")
    for old, new in zip(before, after, strict=True):
        same = old[0] == new[0] and all(map(torch.equal, old[1:], new[1:])) if old and new else old is new
        if not same:
            raise Wrong(f"{what}: the cache has changed, {old and old[0]} became {new and new[0]}")
