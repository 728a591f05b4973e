"""Tuning: which candidates there are, whether they are right, how fast they are, and which one is chosen."""
