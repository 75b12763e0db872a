"""One engine for every placement of weights, gradients and optimizer over the levels of a machine."""
