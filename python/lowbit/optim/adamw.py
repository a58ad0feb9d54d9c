# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW (arXiv 1412.6980, arXiv 1711.05101) with moments in 32, 16, 8 or 4 bits.

m += (1 - b1)(g - m);  v = b2 v + (1 - b2) g^2;  p -= lr m^ / (sqrt(v^) + eps), with bias-corrected m^ and v^.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit.optim.base import LowBitOptimizer
from lowbit.optim.checks import check_number, check_switch


class _Adam(LowBitOptimizer):
    """Base class of the Adam and AdamW optimizers.

    Args:
        params: float32, bfloat16 or float16 parameters on the CPU (DTensors too), or param groups.
        lr: learning rate, a float or a 0-dim tensor.
        betas: decay rates of the two moments, each in [0, 1).
        eps: value added to the denominator.
        weight_decay: in AdamW, the parameter shrinks by lr * weight_decay; in Adam, weight_decay times the parameter is
            added to the gradient.
        amsgrad: whether to divide by the max of all second moments so far.
        block_size: number of elements that share a scale, a power of two from 32 to 4096. The default is 256, or 128
            for the 4-bit classes, as in torchao.
        bf16_stochastic_round: whether bfloat16 parameters are rounded stochastically, up with a probability equal to
            the fraction that is cut off. The seed comes from torch.
        options: maximize; min_8bit_size=4096 (smaller parameters keep float32 moments); optim_bits=32, 16, 8 or 4.

    Raises:
        ValueError: an option is out of range, or the dtype or device of a parameter is not supported.
    """

    RULE = "adamw"
    STATE_FORMAT: ClassVar[str]
    BLOCK_SIZE: ClassVar[int] = 256

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        block_size: int | None = None,
        bf16_stochastic_round: bool = False,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        options.setdefault("state_format", self.STATE_FORMAT)
        block_size = self.BLOCK_SIZE if block_size is None else block_size
        super().__init__(
            params, defaults, block_size=block_size, bf16_stochastic_round=bf16_stochastic_round, **options
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_number(group["eps"], "epsilon value")
        check_switch(group["amsgrad"], "amsgrad")


class _DecoupledAdam(_Adam):
    DECOUPLED = True

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 1e-2, amsgrad: bool = False,
                 **options: Any) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)

    __init__.__doc__ = _Adam.__doc__


class _CoupledAdam(_Adam):
    DECOUPLED = False


class AdamW(_DecoupledAdam):
    """AdamW with float moments: float32, or bfloat16 with ``state_dtype=torch.bfloat16``."""

    STATE_FORMAT = "float32"

    def __init__(
        self, params: Iterable[Any], *args: Any, state_dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        formats = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
        if state_dtype not in formats:
            raise ValueError(f"Invalid state_dtype value: {state_dtype}, must be torch.float32 or torch.bfloat16")
        super().__init__(params, *args, state_format=formats[state_dtype], **options)


class AdamW8bit(_DecoupledAdam):
    """AdamW with 8-bit moments in bitsandbytes' dynamic map, with a scale per 256 elements: 2.03 bytes per parameter.

    Source: Dettmers et al., arXiv 2110.02861.

    Example:
        >>> optimizer = lowbit.optim.AdamW8bit(model.parameters(), lr=1e-3)
    """

    STATE_FORMAT = "dynamic8"


class Adam8bit(_CoupledAdam):
    """Adam with 8-bit moments like those of `AdamW8bit`; weight decay is added to the gradient."""

    STATE_FORMAT = "dynamic8"


class AdamW4bit(_DecoupledAdam):
    """AdamW with 4-bit moments in torchao's maps, with a scale per 128 elements: 1.06 bytes per parameter."""

    STATE_FORMAT = "dynamic4"
    BLOCK_SIZE = 128


class Adam4bit(_CoupledAdam):
    """Adam with 4-bit moments like those of `AdamW4bit`; weight decay is added to the gradient."""

    STATE_FORMAT = "dynamic4"
    BLOCK_SIZE = 128


class AdamWFp8(_DecoupledAdam):
    """AdamW with float8_e4m3fn moments, with a scale per 256 elements."""

    STATE_FORMAT = "float8"


class AdamFp8(_CoupledAdam):
    """Adam with float8_e4m3fn moments like those of `AdamWFp8`; weight decay is added to the gradient."""

    STATE_FORMAT = "float8"
