"""Modules cut along axes other than data, before `lowband.shard` places what is left on data."""
