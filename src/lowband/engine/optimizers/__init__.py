"""Optimizers that need more of a parameter than this rank's shard."""
