"""Our engine and its peers behind one interface, `trainers.trainer.Trainer`, to measure all in one way."""
