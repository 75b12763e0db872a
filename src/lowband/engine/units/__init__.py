"""Parameters that are gathered and reduced together: weights, shards, gradients."""
