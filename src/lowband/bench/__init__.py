"""What times something for its own sake: kernels, collectives, softmax on a CPU, the predictor."""
