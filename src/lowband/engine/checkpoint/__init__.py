"""Checkpoints in their own format: no pickles, every file verified."""
