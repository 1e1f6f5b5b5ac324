"""MiMo (Xiaomi): a Qwen2 whose file also holds heads for multi-token prediction, which the target does not have."""

from specdec.model.archs.qwen2 import read

__all__ = ["read"]
