# SPDX-License-Identifier: Apache-2.0
# A serialized program whose result is a gather.
import torch
from tests.fuzz import check

from lowbit.score.program import ProgramBuilder

torch.manual_seed(0)
p = ProgramBuilder()
code = p.finish(p.gather(p.captured("float", 2), p.op("q"), p.op("k")))
for rows, cols in ((128, 128), (24, 136)):
    check.program(code, [torch.randn(rows, cols)], rows, cols)
