# SPDX-License-Identifier: Apache-2.0
# kv_quantize_ wrote through a const pointer: a copy-on-write clone changed its original.
import torch
from tests.fuzz import check

torch.manual_seed(0)
for codes in ("int8", "int4"):
    check.decode(torch.randn(1, 1, 1, 32), torch.randn(1, 1, 5, 32), torch.randn(1, 1, 5, 32), codes=codes, shared=True)
