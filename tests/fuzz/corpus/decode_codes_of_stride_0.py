# SPDX-License-Identifier: Apache-2.0
# Codes and scales whose tokens or heads have stride 0.
import torch
from tests.fuzz import check

torch.manual_seed(0)
for codes in ("int8", "int4"):
    for memory in ("head-major", "token-major"):
        for expanded in ("tokens", "heads", "codes"):
            q, k, v = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)
            check.decode(q, k, v, codes=codes, memory=memory, expanded=expanded)
