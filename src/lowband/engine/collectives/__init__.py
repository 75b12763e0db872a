"""Collectives over the levels, hop by hop, in the formats of their wires."""
