"""The performance model: predicts a job's time and memory, and plans jobs."""
