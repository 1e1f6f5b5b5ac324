"""What the target gives a drafter to learn from: computed while training (`online`), or read from a cache on disk
(`feature_cache`), which `signature` holds to the target, tokenizer and data that made it.
"""
