"""A machine's scale model on one computer: real sockets over links shaped to its levels, and a real Slurm."""
