"""Our engine and its peers behind the calls of `trainers.trainer.Trainer`, so that all are measured alike."""
