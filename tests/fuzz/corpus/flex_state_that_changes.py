# SPDX-License-Identifier: Apache-2.0
# Every way to hold a value that a mod reads: the first call's value was kept.
import torch
from tests.fuzz.choices import Choices
from tests.fuzz.ops import flex_state

wrong = []
for name in flex_state.AXES:
    for number in (0, 1):
        with torch.random.fork_rng():
            try:
                exec(flex_state.text_of(Choices(number), name), {"__name__": "fuzz_case"})
            except AssertionError as error:
                wrong.append(f"{name}: {error}")
        torch.set_default_dtype(torch.float32)
assert not wrong, f"{len(wrong)} of {2 * len(flex_state.AXES)} are stale:\n" + "\n".join(wrong)
