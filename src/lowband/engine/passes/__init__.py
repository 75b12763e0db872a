"""A module's forward and backward passes, which gather and reduce its units."""
