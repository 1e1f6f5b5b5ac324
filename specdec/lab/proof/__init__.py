"""Tests that decoding is lossless: texts and verifiers against the target's own law."""
