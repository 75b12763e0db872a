"""WHAT IT SHOULD COST: FLOPs, bytes and memory in closed form. Never imports torch."""
