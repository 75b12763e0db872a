"""Benchmarks: kernels, collectives, softmax on a CPU, the predictor."""
