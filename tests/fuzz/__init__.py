# SPDX-License-Identifier: Apache-2.0
"""Differential fuzzing of every op: random programs against float64 torch.

A case is the text of a Python program, made by `generate(choices)` of one module of `ops/` from a stream of random choices. Running
the text is the test: it calls lowbit through a function of `check/`, which compares with float64 torch and raises. So a finding is a
text that can be pasted, and a smaller one is found by making the choices simpler (`choices.py`).

`server.py` runs each batch of cases in a forked child, so that a crash, a hang, or state that a case leaves behind costs no other
case; `driver.py` runs a failing batch again one by one and shrinks what fails; `__main__.py` does that for hours; `test_fuzz.py` for
a minute in the suite, with the texts of `corpus/` first.
"""
