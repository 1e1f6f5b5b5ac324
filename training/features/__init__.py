"""Target features that a drafter is trained on.

They are computed during training (`online`), or read from a cache on disk (`feature_cache`). `signature` identifies the
target, tokenizer and data that made a cache.
"""
