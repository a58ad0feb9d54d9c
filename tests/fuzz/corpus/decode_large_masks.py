# SPDX-License-Identifier: Apache-2.0
# A token whose mask is large everywhere, in decode over floats and codes.
import torch
from tests.fuzz import check

torch.manual_seed(0)
for value in (torch.finfo(torch.float32).min, -1e38, 1e30, -1e12):
    for codes in ("", "int8", "int4"):
        mask = torch.full((1, 2, 1, 33), value)
        check.decode(
            torch.randn(1, 2, 1, 32), torch.randn(1, 2, 33, 32), torch.randn(1, 2, 33, 32), codes=codes, mask=mask
        )
