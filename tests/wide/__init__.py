"""Modules, optimizers and loops as users bring them, sharded at random, against one plain process."""
