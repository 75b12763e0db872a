"""One engine for every placement of weights, gradients and optimizer states over a machine's levels."""
