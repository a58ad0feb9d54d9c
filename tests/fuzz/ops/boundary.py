# SPDX-License-Identifier: Apache-2.0
"""The boundary of the library: odd numpy arrays given to `_C`, forks beside threads, a fork after torch's threads."""

from __future__ import annotations

from ..choices import Choices
from ..tensors import header

_DTYPES = (
    "numpy.float32", "numpy.dtype([])", "numpy.dtype([('a', 'f4')])", "object", "'U0'", "'S0'", "'V0'", "'V3'", "bool", "complex", "'datetime64[s]'",
    "'>f4'", "numpy.longdouble", "numpy.float16", "numpy.uint16", "numpy.int8", "numpy.uint8",
)  # fmt: skip
_CALLS = (
    "_C.all_finite({0})", "_C.quantize({0}, {1}, 0, 0, False, 0)",
    "_C.encode_state({0}, 2, True, 256, {1}, {0})", "_C.decode_state({1}, {0}, 2, True, 256, {0})",
    "internals.decode({0}, {1}, {1}, {0}, 1.0)", "internals.score_program_eval([1, 0, 0, 0], [{1}], 0, 0, 0, 0, {0})", "_C.OptimStep(0, 0, 256, [{0}], [{1}], [[{0}]], [], [{1}], {{}}).run()",
)  # fmt: skip
_FLEX = "check.flex_now(*(torch.randn(2, 8, 200, 16) for _ in range(3)), score_mod=lambda s, b, h, i, j: s + h{0})\n"
_FORKS = {
    "after torch's threads": "x = torch.randn(600, 600)\nfor _ in range(3):\n    x = (x @ x).tanh()  # torch's threads run, lowbit's have not\n"
    + _FLEX.format(", where=check.in_child"),
    "after lowbit's threads": _FLEX.format("") + _FLEX.format(" * 2, where=check.in_child"),
    "while a thread traces": "check.forks_while_a_thread_traces(30)\n",
    "of a thread": _FLEX.format(", where=lambda call: check.in_thread(lambda: check.in_child(call))"),
}


def generate(choices: Choices) -> str:
    c = choices
    if c.chance(25):
        return f"{header(c)}\n{_FORKS[c.pick(*_FORKS)]}"
    text = f"import numpy\n{header(c)}from lowbit import _C\nfrom tests import internals\n\n"
    for name in "ab":
        shape = c.pick("(3,)", "(0,)", "()", "(3, 0)", "(3, 3)", "(1, 2, 3, 32)", "(1, 2, 3, 0)")
        view = c.pick("", "", "[::-1]", "[..., ::2]", ".T") if shape != "()" else ""
        text += f"{name} = numpy.zeros({shape}, dtype={c.pick(*_DTYPES)}){view}\n"
    return f"{text}check.no_crash(lambda: {c.pick(*_CALLS).format('a', 'b')})\n"
