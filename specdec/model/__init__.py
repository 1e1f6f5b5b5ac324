"""Models as decoding needs them: the target, its attention and cache, and how its checkpoint is read."""
