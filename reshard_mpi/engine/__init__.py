"""Moves the bytes a plan names. Knows byte ranges and boxes; neither formats nor strategies."""
