# SPDX-License-Identifier: Apache-2.0
"""The front end of the compiler of mods: trace a score_mod or mask_mod (tracer.py) into a score program (program.py),
and cache it (program_cache.py). The back end, from the program to the steps that kernels run, is csrc/score."""
