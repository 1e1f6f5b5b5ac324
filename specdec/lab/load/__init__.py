"""Servers and policies under load: a client that measures, and a simulation of what another choice would have given."""
