"""Axes of parallelism beside data: what their ranks compute and exchange."""
