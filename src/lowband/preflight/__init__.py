"""Preflight: two minutes on the nodes of a run that find what is wrong before the run itself starts."""

TIME_LIMIT_S = 120
