# SPDX-License-Identifier: Apache-2.0
"""An optimizer step in torch float64: the maps of the state formats, encoding, the rules, and stochastic rounding.

A quantized moment is stored as codes and one float32 scale per block of consecutive elements: moment = map[code] *
scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

FLOAT8_MAX = 448.0
SMALLEST = 2.0**-126  # a smaller scale has no float32 inverse, so its block counts as zeros


def dynamic_map(signed: bool, decades: int) -> Tensor:
    """Return the values of a dynamic map by code, sorted, float64 ``[2 ** (decades + 1)]``.

    This is ``create_dynamic_map`` of bitsandbytes and torchao. Decade d = 0 .. decades - 1 spans 10**(d - decades) ..
    10**(d - decades + 1) and has 2**d bins (unsigned: 2**(d + 1)) of equal width, each represented by its middle. 0 and
    1 are additional values; a signed map also has the negative of every bin.
    """
    positive = []
    for decade in range(decades):
        bins = 2**decade if signed else 2 ** (decade + 1)
        top = 10.0 ** (decade - decades + 1)
        positive += [top * (0.1 + 0.9 * (bin + 0.5) / bins) for bin in range(bins)]
    negative = [-value for value in reversed(positive)] if signed else []
    return torch.tensor([*negative, 0.0, *positive, 1.0], dtype=torch.float64, device="cpu")


def code_map(format: str, signed: bool) -> Tensor:
    """Return the decoded value of every code of a quantized state format, before the scale, float64."""
    if format == "dynamic8":
        return dynamic_map(signed, 7)
    if format == "dynamic4":  # torchao's: the unsigned one has no zero
        return dynamic_map(True, 3) if signed else torch.linspace(0, 1, 17, dtype=torch.float64, device="cpu")[1:]
    if format == "float8":
        return torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).double()
    raise ValueError(f"code_map: no codes in format {format!r}")


def largest_code(format: str) -> float:
    """Return the decoded value of the largest element of a block: absmax / scale."""
    return FLOAT8_MAX if format == "float8" else 1.0


def blocks(values: Tensor, block_size: int) -> Tensor:
    """Split flat values into blocks, the last padded with zeros: ``[ceil(n / block_size), block_size]``."""
    return torch.nn.functional.pad(values.flatten(), (0, -values.numel() % block_size)).view(-1, block_size)


def scales(values: Tensor, format: str, block_size: int) -> Tensor:
    """Return the scale of each block, float64: absmax / `largest_code`; nan for a block with inf or nan, and 0 if it
    would be below `SMALLEST`."""
    absmax = blocks(values.double(), block_size).abs().amax(1)
    scale = absmax / largest_code(format)
    scale = torch.where(scale < SMALLEST, 0.0, scale)
    return torch.where(blocks(values.double(), block_size).isfinite().all(1), scale, math.nan)


def nearest_code(relative: Tensor, format: str, signed: bool) -> Tensor:
    """Return the code of the value nearest to each element, by search. float8 breaks ties to even, the maps upward.

    A step divides by the root of a nonnegative moment, so a positive value never gets the code of 0.
    """
    if format == "float8":  # via float32: exact unless relative has more than 24 bits
        codes = relative.float().to(torch.float8_e4m3fn).view(torch.uint8).long()
    else:
        values = code_map(format, signed)
        middles = (values[1:] + values[:-1]) / 2
        codes = torch.searchsorted(middles, relative.contiguous(), right=True)
    if signed or format == "dynamic4":  # the unsigned dynamic4 map has no 0
        return codes
    return torch.where(relative > 0, codes.clamp(min=1), codes)


def decode(codes: Tensor, scale: Tensor, format: str, signed: bool, block_size: int) -> Tensor:
    """Return the moments of unpacked codes (any shape), float64 of the same shape."""
    spread = scale.double().repeat_interleave(block_size)[: codes.numel()].view(codes.shape)
    return code_map(format, signed)[codes.long()] * spread


def unpack_nibbles(packed: Tensor, numel: int) -> Tensor:
    """Return the codes of a 4-bit state, which has two per byte, the first in the high nibble; uint8 ``[numel]``."""
    return torch.stack((packed >> 4, packed & 15), dim=1).flatten()[:numel]


def adamw(
    p: Tensor, g: Tensor, moments: list[Tensor], step: int, hyper: Mapping[str, float]
) -> tuple[Tensor, list[Tensor]]:
    """Take one step of Adam, with decoupled weight decay (AdamW), or with decay added to the gradient.

    moments: exp_avg, exp_avg_sq[, max_exp_avg_sq].

    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
    p = p (1 - lr decay) - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    """
    beta1, beta2, lr = hyper["beta1"], hyper["beta2"], hyper["lr"]
    if hyper["decoupled"]:
        p = p * (1 - lr * hyper["weight_decay"])
    else:
        g = g + hyper["weight_decay"] * p
    m = beta1 * moments[0] + (1 - beta1) * g
    v = beta2 * moments[1] + (1 - beta2) * g * g
    after = [m, v]
    if hyper["amsgrad"]:
        v = torch.maximum(moments[2], v)
        after.append(v)
    denominator = v.sqrt() / math.sqrt(1 - beta2**step) + hyper["eps"]
    return p - lr / (1 - beta1**step) * m / denominator, after


def sgd(
    p: Tensor, g: Tensor, moments: list[Tensor], step: int, hyper: Mapping[str, float]
) -> tuple[Tensor, list[Tensor]]:
    """Take one step of SGD as in torch: the first step uses the gradient as momentum, without dampening. moments:
    momentum, or none."""
    g = g + hyper["weight_decay"] * p
    if hyper["momentum"] == 0:
        return p - hyper["lr"] * g, []
    buffer = g if step == 1 else hyper["momentum"] * moments[0] + (1 - hyper["dampening"]) * g
    update = g + hyper["momentum"] * buffer if hyper["nesterov"] else buffer
    return p - hyper["lr"] * update, [buffer]


def lion(
    p: Tensor, g: Tensor, moments: list[Tensor], step: int, hyper: Mapping[str, float]
) -> tuple[Tensor, list[Tensor]]:
    """Take one step of Lion (arXiv 2302.06675): p moves by lr in the direction of the sign of an average. moments:
    exp_avg."""
    beta1, beta2, lr = hyper["beta1"], hyper["beta2"], hyper["lr"]
    average = beta1 * moments[0] + (1 - beta1) * g
    return p * (1 - lr * hyper["weight_decay"]) - lr * average.sign(), [beta2 * moments[0] + (1 - beta2) * g]


def muon(
    p: Tensor, g: Tensor, moments: list[Tensor], step: int, hyper: Mapping[str, float]
) -> tuple[Tensor, list[Tensor]]:
    """Return the direction of a step of Muon (Jordan et al., 2024) before it is orthogonalized, in place of the new
    parameter, and the new momentum. moments: momentum."""
    buffer = hyper["momentum"] * moments[0] + (1 - hyper["momentum"]) * g
    return hyper["momentum"] * buffer + (1 - hyper["momentum"]) * g if hyper["nesterov"] else buffer, [buffer]


RULES = {"adamw": adamw, "sgd": sgd, "lion": lion, "muon": muon}


def orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return a matrix after Newton-Schulz steps X <- a X + (b A + c A A) X, A = X X^T, from X = matrix / norm."""
    a, b, c = coefficients
    x = matrix.double() / max(float(matrix.double().norm()), eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def corrected(p: Tensor, correction: Tensor) -> Tensor:
    """Return the values of bfloat16 parameters with corrections, float64: a correction counts 256ths of the distance to
    the next bfloat16 value, away from zero if it is positive, else towards zero, which has none behind it."""
    bits, sign = p.view(torch.int16).int() & 0x7FFF, p.double().sign()
    behind = (bits + correction.sign()).clamp(min=0).short().view(torch.bfloat16).double() * sign.where(sign != 0, 1.0)
    away = behind - p.double()
    return torch.where(correction == 0, p.double(), p.double() + correction.double().abs() / 256 * away)


def split(values: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return float32 values ``[n]`` as bfloat16 parameters and their int8 corrections, as step number ``step`` does.

    The last 8 of 32 bits are rounded up if they and the threshold of the element, which a sequence of Weyl gives, make
    256. Thresholds repeat after 16 elements.
    """
    element = torch.arange(values.numel()) % 16 * 0xC13FA9A9 + step * 0x9E3779B9
    whole = (values.view(torch.int32).long() % 2**32 + (element % 2**32 >> 24)) >> 8
    nearest = whole + 128 >> 8
    bits = torch.where(nearest >= 2**15, nearest - 2**16, nearest).short()
    p = torch.where(values.isnan(), math.nan, bits.view(torch.bfloat16)).bfloat16()
    return p, (whole - 256 * nearest).to(torch.int8)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return four random words of Philox4x32-10 for a counter of four words and a key of two."""
    (c0, c1, c2, c3), (key0, key1), word = counter, key, 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ key0, b & word, a >> 32 ^ c3 ^ key1, a & word
        key0, key1 = (key0 + 0x9E3779B9) & word, (key1 + 0xBB67AE85) & word
    return c0, c1, c2, c3


def random16(numel: int, block_size: int, seed: int, step: int, index: int) -> Tensor:
    """Return 16 random bits for each element of parameter number ``index`` at ``step``: int64 ``[numel]``.

    Philox gives each tensor a seed and each of its blocks a key. An element hashes its index in the block with that key
    (lowbias32).
    """
    word = 0xFFFFFFFF

    def times(x: Tensor, factor: int) -> Tensor:  # low 32 bits; in halves, since int64 is signed
        return (x * (factor & 0xFFFF) + ((x * (factor >> 16) & 0xFFFF) << 16)) & word

    high, low, *_ = philox4x32((index, 0, step, 0), (seed & word, seed >> 32 & word))
    keys = torch.tensor([philox4x32((block, 0, 0, 0), (low, high))[0] for block in range(-(-numel // block_size))])
    i = torch.arange(numel)
    x = times(i % block_size, 0x9E3779B9) ^ keys.repeat_interleave(block_size)[:numel]
    x = times(x ^ x >> 16, 0x7FEB352D)
    x = times(x ^ x >> 15, 0x846CA68B)
    return (x ^ x >> 16) >> 16


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 ``[n]`` to bfloat16: up in magnitude, with a probability equal to the fraction that is cut off. inf
    and nan stay."""
    raised = (x.view(torch.int32).long() & 0xFFFFFFFF) + bits & 0xFFFF0000
    rounded = torch.where(raised >= 2**31, raised - 2**32, raised).int().view(torch.float32)
    return torch.where(x.isnan(), x, rounded).bfloat16()
