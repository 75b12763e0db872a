"""Run folders -> raw tables (collect.py) -> derived tables (build.py, derived/). Never imports torch."""
