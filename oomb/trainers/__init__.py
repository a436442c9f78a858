"""`oomb.Trainer`, the TRL trainers and their checkpoints."""
