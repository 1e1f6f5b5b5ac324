"""From a target's logits to tokens: filters, penalties, draws."""
