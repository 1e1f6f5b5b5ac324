"""From logits to a token: penalties, temperature and filters, draws (docs/sampling.md)."""
