"""`lowband bench-kernel`: check each kernel, then time it with torch's kernels and the device's limits."""
