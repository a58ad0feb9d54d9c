# SPDX-License-Identifier: Apache-2.0
"""lowbit inside transformers, peft, TRL, accelerate and Liger: LowbitConfig, its quantizer, files and chat."""
