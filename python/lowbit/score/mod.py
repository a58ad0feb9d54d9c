# SPDX-License-Identifier: Apache-2.0
"""The base classes of the mods in `lowbit.attention.masks` and `lowbit.attention.mods`, which can be drawn. Plain
functions work everywhere too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

_SHADES = " ░▒▓█"


class MaskMod:
    """A mask_mod with a name and a picture. ``&``, ``|`` and ``~`` combine it with others, also with plain functions on
    either side.

    Args:
        function: (b, h, q_idx, kv_idx) -> bool: whether the query sees the key.
        name: shown by repr and above pictures.
    """

    def __init__(self, function: MaskFunction, name: str) -> None:
        self.function = function
        self.__name__ = name

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.function(b, h, q_idx, kv_idx)

    def __and__(self, other: MaskFunction) -> MaskMod:
        return MaskMod(lambda b, h, q, k: self(b, h, q, k) & other(b, h, q, k), f"({self.__name__} & {_name(other)})")

    def __or__(self, other: MaskFunction) -> MaskMod:
        return MaskMod(lambda b, h, q, k: self(b, h, q, k) | other(b, h, q, k), f"({self.__name__} | {_name(other)})")

    def __rand__(self, other: MaskFunction) -> MaskMod:
        return MaskMod(other, _name(other)) & self

    def __ror__(self, other: MaskFunction) -> MaskMod:
        return MaskMod(other, _name(other)) | self

    def __invert__(self) -> MaskMod:
        return MaskMod(lambda b, h, q, k: ~self(b, h, q, k), f"~{self.__name__}")

    def __repr__(self) -> str:
        return self.__name__

    def dense(self, q_len: int, kv_len: int | None = None, *, b: int = 0, h: int = 0) -> Tensor:
        """Return the mask of one batch entry and head, bool ``[q_len, kv_len]``."""
        return _dense(lambda q, k: self(_number(b), _number(h), q, k), q_len, kv_len)

    def text(self, q_len: int = 16, kv_len: int | None = None, *, b: int = 0, h: int = 0) -> str:
        """Return a picture in characters: a line per query, with a block for each key it sees."""
        return _text(self.dense(q_len, kv_len, b=b, h=h).double())

    def plot(self, q_len: int = 64, kv_len: int | None = None, *, b: int = 0, h: int = 0, ax: Any = None) -> Any:
        """Draw the mask with matplotlib and return the axes: queries down, keys across, dark where visible."""
        return draw(self.dense(q_len, kv_len, b=b, h=h).double(), self.__name__, ax)


class ScoreMod:
    """A score_mod with a name and a picture.

    Args:
        function: (score, b, h, q_idx, kv_idx) -> score.
        name: shown by repr and above pictures.
    """

    def __init__(self, function: ScoreFunction, name: str) -> None:
        self.function = function
        self.__name__ = name

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.function(score, b, h, q_idx, kv_idx)

    def __repr__(self) -> str:
        return self.__name__

    def dense(self, q_len: int, kv_len: int | None = None, *, score: float = 0.0, b: int = 0, h: int = 0) -> Tensor:
        """Return what the mod makes of the score ``score`` at each position, float32 ``[q_len, kv_len]``."""
        return _dense(lambda q, k: self(_number(score), _number(b), _number(h), q, k), q_len, kv_len)

    def text(self, q_len: int = 16, kv_len: int | None = None, *, score: float = 0.0, b: int = 0, h: int = 0) -> str:
        """Return a picture in characters: a line per query, darker for higher scores."""
        return _text(self.dense(q_len, kv_len, score=score, b=b, h=h))

    def plot(
        self, q_len: int = 64, kv_len: int | None = None, *, score: float = 0.0, b: int = 0, h: int = 0, ax: Any = None
    ) -> Any:
        """Draw the scores with matplotlib and return the axes: queries down, keys across, darker for higher scores."""
        return draw(self.dense(q_len, kv_len, score=score, b=b, h=h), self.__name__, ax)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32 if isinstance(value, float) else torch.int64, device="cpu")


def _name(mod: Callable[..., Tensor]) -> str:
    return getattr(mod, "__name__", repr(mod))


def _dense(function: Callable[[Tensor, Tensor], Tensor], q_len: int, kv_len: int | None) -> Tensor:
    rows = torch.arange(q_len, device="cpu")[:, None]
    columns = torch.arange(q_len if kv_len is None else kv_len, device="cpu")[None, :]
    with torch.no_grad():
        return function(rows, columns).expand(q_len, columns.shape[1])


def _text(values: Tensor) -> str:
    finite = values[values.isfinite()]
    low, high = (finite.min(), finite.max()) if finite.numel() else (_number(0.0), _number(0.0))
    depth = ((values - low) / (high - low)).clamp(0, 1) if high > low else torch.full_like(values, float(high > 0))
    levels = (depth.nan_to_num(0.0) * (len(_SHADES) - 1)).round().long()
    return "\n".join("".join(_SHADES[level] for level in row).rstrip() for row in levels.tolist())


def draw(values: Tensor, title: str, ax: Any, lengths: tuple[int, int] | None = None, **options: Any) -> Any:
    """Draw values ``[queries, keys]`` on matplotlib axes and return these. If ``ax`` is None, a new figure is created,
    large enough for all labels.

    Args:
        values: ``[queries, keys]``, or one value per block.
        title: the title of the picture.
        ax: the axes or None.
        lengths: the numbers of queries and keys that the picture spans, if its rows and columns are blocks.
        options: arguments of matplotlib.
    """
    if ax is None:
        try:
            import matplotlib.pyplot as plt
        except ModuleNotFoundError as error:
            raise ImportError("plot needs matplotlib: pip install matplotlib") from error
        _, ax = plt.subplots(figsize=(3.5, 3.5), layout="constrained")
    rows, columns = lengths or values.shape
    shift = 0.0 if lengths else 0.5
    ax.imshow(
        values.numpy(),
        cmap="Blues",
        interpolation="nearest",
        aspect="equal",
        extent=(-shift, columns - shift, rows - shift, -shift),
        **options,
    )
    ax.set(xlabel="key", ylabel="query")
    ax.set_title(title, fontsize="medium", wrap=True)
    return ax
