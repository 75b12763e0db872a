"""The model that is trained, written for a single device, and its data."""
