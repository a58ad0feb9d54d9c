# SPDX-License-Identifier: Apache-2.0
# Rounding of inf to 16 bits, and to inf.
from tests.fuzz import check

from lowbit.score.program import ProgramBuilder

for name in ("to_bfloat16", "to_float16"):
    for number in (float("-inf"), 1e300):
        p = ProgramBuilder()
        code = p.finish(p.op(name, p.constant(number)))
        check.program(code, [], 16, 16, jumps=True)
