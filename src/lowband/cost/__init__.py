"""FLOPs, bytes, memory and time in closed form. Never imports torch."""
