"""Kernels, one file each: the reference in plain torch, what it costs, and its fast paths under one name."""
