"""`lowband bench-kernel`: check each kernel, then time it with torch's kernels and the device's limits."""

# The parts, in the order in which they run: each is a file here with `groups(device)`.
PARTS = (
    "ceilings",
    "products",
    "block_quant",
    "softmax",
    "attention",
    "attention_kinds",
    "training",
    "experts",
)
