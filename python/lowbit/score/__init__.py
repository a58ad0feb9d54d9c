# SPDX-License-Identifier: Apache-2.0
"""The compiler of mods, its front end: a score_mod or mask_mod is traced (tracer.py) into a score program (program.py),
which is kept (program_cache.py). The other half, from the program to the steps that kernels run, is csrc/score."""
