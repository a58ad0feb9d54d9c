# SPDX-License-Identifier: Apache-2.0
"""The quantization methods of other packages in whose layout packed weights are written, by their ``quant_method``.

Each has a file with a `Writer`; the file of the same method in ``methods`` describes the layout.
"""

from __future__ import annotations

from lowbit.checkpoints.writers.awq import AWQWriter
from lowbit.checkpoints.writers.compressed_tensors import CompressedTensorsWriter
from lowbit.checkpoints.writers.gptq import GPTQWriter
from lowbit.checkpoints.writers.writer import Writer

_CLASSES: tuple[type[Writer], ...] = (CompressedTensorsWriter, GPTQWriter, AWQWriter)
WRITERS = {cls.name: cls for cls in _CLASSES}
