"""MiMo (Xiaomi): a Qwen2 whose file also holds heads for multi-token prediction, which are no part of the target."""

from specdec.model.archs.qwen2 import read

__all__ = ["read"]
