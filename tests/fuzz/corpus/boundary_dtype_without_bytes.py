# SPDX-License-Identifier: Apache-2.0
# A numpy array whose dtype has no bytes: SIGFPE.
import numpy
from tests.fuzz import check

from lowbit import _C

for shape in (3, 0, (3, 3)):
    check.no_crash(lambda: _C.all_finite(numpy.zeros(shape, dtype=numpy.dtype([]))))
