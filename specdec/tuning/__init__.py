"""What a round costs here, which tree is the fastest, and policies that choose trees by the load (docs/adaptive.md)."""
