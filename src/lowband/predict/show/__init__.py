"""Predictions and plans as text, files and a page."""
