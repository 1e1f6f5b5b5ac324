"""Objectives: what a drafter is trained towards."""
