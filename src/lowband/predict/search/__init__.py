"""Which of many layouts and schemes is best for a job."""
