"""Sub-commands of the command line, by subject: parsing only."""
