"""Training of drafters: data, the target's features, objectives, the loop, and the commands that use them."""
