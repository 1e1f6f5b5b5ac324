"""Training of drafters: data, features, objectives, loop."""
