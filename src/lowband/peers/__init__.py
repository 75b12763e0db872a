"""Other engines behind the calls of `run.prepare.Prepared`, so that they are measured as ours is."""
