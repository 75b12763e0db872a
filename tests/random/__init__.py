"""Random modules, placements and training programs on ranks, compared with one process bit by bit."""
