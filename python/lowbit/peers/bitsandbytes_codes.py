# SPDX-License-Identifier: Apache-2.0
"""bitsandbytes' blockwise 8-bit codes, computed by the encoder of lowbit's optimizer states, which has the same maps.

Codes are the nearest ones and zero stays zero, while bitsandbytes' CPU kernel looks them up in 65,536 bins. With the
unsigned map, a positive value never gets the code of 0, as in lowbit's states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from lowbit import _C
from lowbit.ops.fakes import FLOATS

_DYNAMIC8 = _C.STATE_FORMATS["dynamic8"]
_BLOCK_SIZES = {2**i for i in range(5, 13)}  # 32 to 4096, of those that bitsandbytes has


def quantize_blockwise(
    theirs: Callable[[], tuple[Tensor, Tensor]], A: Tensor, code: Tensor, blocksize: int
) -> tuple[Tensor, Tensor]:
    """Return codes of A's shape and the absmax of each block. Maps other than the two dynamic ones are left to
    bitsandbytes."""
    signed = is_signed_map(code)
    if signed is None or blocksize not in _BLOCK_SIZES or A.dtype not in FLOATS or not A.numel():
        return theirs()
    values = A.detach().float().contiguous()
    if not signed and values.min() < 0:  # the map begins with 0
        return theirs()
    codes = values.new_empty(A.shape, dtype=torch.uint8)
    absmax = values.new_empty(-(-A.numel() // blocksize))
    _C.encode_state(values, _DYNAMIC8, signed, blocksize, codes, absmax)
    return codes, absmax


def is_signed_map(code: Tensor) -> bool | None:
    """Return True if these 256 values are bitsandbytes' signed dynamic map, False for the unsigned one, and None for
    another map."""
    for signed in (True, False):
        if code.shape == (256,) and code.dtype == torch.float32 and torch.equal(code, _map(signed)):
            return signed
    return None


@functools.cache
def _map(signed: bool) -> Tensor:
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map(signed)
