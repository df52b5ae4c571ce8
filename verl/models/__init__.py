"""Language models: loading, packed batches, attention, log-probs and values."""
