<<<<<<< HEAD
"""From a target's logits to tokens: filters, penalties, draws."""
=======
"""From logits to a token: penalties, temperature and filters, draws (docs/sampling.md)."""
>>>>>>> house
