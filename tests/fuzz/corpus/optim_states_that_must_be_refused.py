# SPDX-License-Identifier: Apache-2.0
# State dicts that do not fit: each was accepted, and codes became moments. And states that are replaced between steps.
import torch
from tests.fuzz import check
from tests.fuzz.choices import Choices
from tests.fuzz.ops import optim_state

for name, change in optim_state.MUTATIONS.items():
    for optimizer in ("AdamW8bit", "SGD8bit"):
        exec(optim_state.refused(Choices(again=[]), name, optimizer, change), {"torch": torch, "check": check})
for name, change in optim_state.CHANGES.items():
    exec(optim_state.changed(Choices(again=[]), name, "AdamW8bit", change), {"torch": torch, "check": check})
for name in optim_state.FOREIGN:
    exec(optim_state.foreign(Choices(again=[]), name), {"torch": torch, "check": check})
