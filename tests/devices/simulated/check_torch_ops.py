# SPDX-License-Identifier: Apache-2.0
"""torch's own device-generic tests: every operator of `op_db`, float32, up to two samples, here and on the CPU."""

from __future__ import annotations

import torch

from lowbit.devices import simulated

simulated.enable()  # before torch's tests look which devices there are

from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_utils import TestCase  # noqa: E402

SAMPLES = 2
NO_VALUES = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}  # only their shapes are compared
NOT_HERE = {
    "sparse.sampled_addmm": "no sparse tensors on the device",
    "to_sparse": "no sparse tensors on the device",
}


def on_cpu(value):
    """The same on the CPU; a tensor with its whole storage, because some ops look beyond the view."""
    if isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg()):
        return value.detach().cpu()
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage().cpu()
        return torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.shape, value.stride())
    if isinstance(value, list | tuple):
        items = [on_cpu(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    return torch.device("cpu") if str(value).startswith("lowbit_sim") else value


class TestOps(TestCase):
    @ops(op_db, allowed_dtypes=(torch.float32,))
    def test_op(self, device, dtype, op):
        if op.name in NOT_HERE:
            self.skipTest(NOT_HERE[op.name])
        for i, sample in enumerate(op.sample_inputs(device, dtype, requires_grad=False)):
            if i == SAMPLES:
                break
            arguments = on_cpu((sample.input, sample.args, sample.kwargs))
            # torch.manual_seed keeps its caller's stack for devices to come: a third of the time
            torch.default_generator.manual_seed(0)
            wanted = op(arguments[0], *arguments[1], **arguments[2])
            torch.default_generator.manual_seed(0)
            got = on_cpu(op(sample.input, *sample.args, **sample.kwargs))
            if op.name in NO_VALUES:
                assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
            else:
                self.assertEqual(got, wanted)


instantiate_device_type_tests(TestOps, globals(), only_for="privateuse1")
