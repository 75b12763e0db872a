"""Replicas that train on their own and exchange weights every so many steps."""
