"""Training: actor, critic and reference over packed micro-batches."""
