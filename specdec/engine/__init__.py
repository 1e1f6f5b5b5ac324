"""The decoding loop: rounds, the batch they work on, how they are read, and what they leave in a trace."""
