"""WHAT HAPPENS: one training run, from its spec to its records."""
