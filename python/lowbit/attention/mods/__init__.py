# SPDX-License-Identifier: Apache-2.0
"""Ready-made score mods for `flex_attention`. ``mods.alibi(8).plot(h=0)`` draws what a mod adds."""

from lowbit.attention.mods.alibi import alibi
from lowbit.attention.mods.learned_bias import learned_bias
from lowbit.attention.mods.softcap import softcap
from lowbit.attention.mods.t5_bias import t5_bias

__all__ = ["alibi", "learned_bias", "softcap", "t5_bias"]
