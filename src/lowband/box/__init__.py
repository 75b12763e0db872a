"""A machine's scale model on one computer: real sockets on links shaped like its levels, and a real Slurm."""
