# SPDX-License-Identifier: Apache-2.0
"""lowbit in transformers, peft, TRL, accelerate and Liger: LowbitConfig and its quantizer, checkpoints, and chat."""
