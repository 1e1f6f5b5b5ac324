"""Compiled rounds: a round's operators are recorded as a graph, and Inductor makes one function of them."""
