"""The model that is trained (single-device) and its data."""
