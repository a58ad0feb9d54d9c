# SPDX-License-Identifier: Apache-2.0
"""Explain a score_mod, mask_mod or BlockMask: its program, how often each step runs, and its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch.nn.attention.flex_attention import BlockMask

from lowbit import _C
from lowbit.attention.block_mask import EMPTY, FULL, PARTIAL, block_classes, to_classes
from lowbit.score.program import UnknownOp
from lowbit.score.program_cache import BoundProgram, bind, positional_arguments

_RATES = "once per: head (batch and head), row (query), column (key), diagonal (key - query), tile (every score)"


@dataclass(frozen=True, slots=True)
class ModExplanation:
    """The explanation of a mod. It prints as text; ``source`` returns the program as device functions.

    Attributes:
        kind: "score_mod", "mask_mod" or "block mask".
        forward, backward: the steps of the program, each with its rate; empty if the mod changes nothing.
        captured: the dtype and shape of each tensor that the program reads.
        through_torch: why there is no program, or an empty string.
        blocks: for masks, the numbers of empty, partial and full blocks.
    """

    kind: str
    name: str
    forward: str
    backward: str
    captured: tuple[str, ...]
    through_torch: str = ""
    blocks: tuple[int, int, int] | None = None
    _program: BoundProgram | None = field(default=None, compare=False)

    def source(self, language: str) -> str:
        """Return the program as device functions: ``score_mod`` and ``score_mod_gradient``, or ``mask_mod``.

        Args:
            language: "cuda" (CUDA C) or "opencl" (OpenCL C).

        Raises:
            ValueError: ``language`` is another one, or the mod has no program, because it changes nothing or runs
                through torch.
        """
        if self._program is None:
            reason = f"it runs through torch: {self.through_torch}" if self.through_torch else "it changes nothing"
            raise ValueError(f"source: {self.kind} {self.name} has no program, {reason}")
        return _C.score_program_source(self._program.code, self._program.captured, language)

    def __repr__(self) -> str:
        lines = [f"{self.kind} {self.name}"]
        if self.through_torch:
            lines.append(f"runs through torch, slowly: {self.through_torch}")
        elif not self.forward:
            lines.append("changes nothing: not run")
        else:
            lines += [f"  t{number}: {text}" for number, text in enumerate(self.captured)]
            lines += ["forward", *(f"  {line}" for line in self.forward.splitlines()), f"  ({_RATES})"]
            if self.kind == "score_mod":
                lines += ["backward", *(f"  {line}" for line in self.backward.splitlines())]
        if self.blocks:
            empty, partial, full = self.blocks
            lines.append(
                f"blocks: {empty} empty (skipped), {partial} partial (mask_mod asked), {full} full (mask_mod not asked)"
            )
        return "\n".join(lines)


def explain_mod(
    mod: Callable[..., Any] | BlockMask, *, q_len: int = 4096, kv_len: int | None = None, block_size: int = 128
) -> ModExplanation:
    """Explain a mod: its steps and how often each runs; for a mask, the number of blocks of each kind.

    Args:
        mod: a score_mod, a mask_mod, or a BlockMask.
        q_len, kv_len: the lengths for which the blocks of a mask_mod are counted; kv_len defaults to q_len.
        block_size: the number of queries and of keys in a block.

    Raises:
        TypeError: ``mod`` takes neither 5 nor 4 arguments.
        RuntimeError: for the reasons for which flex_attention raises it.
    """
    if isinstance(mod, BlockMask):
        made = _program("block mask", mod.mask_mod, mask=True)
        return _with_blocks(made, to_classes(mod))
    count = positional_arguments(mod)
    if count not in (4, 5):
        raise TypeError(
            f"explain: mod must be a score_mod of 5 positional arguments or a mask_mod of 4, got a function of {count}"
        )
    made = _program("score_mod" if count == 5 else "mask_mod", mod, mask=count == 4)
    if count == 5 or made.through_torch:
        return made
    return _with_blocks(
        made, block_classes(mod, 1, 1, q_len, q_len if kv_len is None else kv_len, block_size, block_size)
    )


def _with_blocks(made: ModExplanation, classes: Any) -> ModExplanation:
    empty, partial, full = (int((classes == value).sum()) for value in (EMPTY, PARTIAL, FULL))
    return replace(made, blocks=(empty, partial, full))


def _program(kind: str, mod: Callable[..., Any], *, mask: bool) -> ModExplanation:
    name = getattr(mod, "__name__", type(mod).__name__)
    try:
        bound = bind("explain", mod, mask=mask)
    except UnknownOp as unknown:
        return ModExplanation(kind, name, "", "", (), str(unknown))
    if not bound.code:
        return ModExplanation(kind, name, "", "", ())
    steps = _C.score_program_explain(bound.code)
    captured = tuple(f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in bound.captured)
    return ModExplanation(kind, name, steps["forward"].strip(), steps["backward"].strip(), captured, _program=bound)
