"""`lowband bench-kernel`: each kernel checked, then timed beside torch's and the device's limits."""
