"""Axes of parallelism beside data: modules cut along tensor, and chains of them in stages of a pipeline."""
