"""WHAT IT SHOWS: run folders -> tables -> figures and claims. Needs spec/ and cost/; never imports torch."""
