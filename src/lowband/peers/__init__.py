"""Other engines behind the calls of `peers.trainer.Trainer`, so that they are measured as ours is."""
