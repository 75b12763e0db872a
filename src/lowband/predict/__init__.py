"""The performance model of a job: time, memory and plans, predicted."""
