"""Kernels, one file each: the reference in plain torch, its costs, and the fast paths under one name."""
