"""What a round costs, measured or by formulas, and the fastest setting of a pair."""
