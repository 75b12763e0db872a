"""One training run, from its spec to its records."""
