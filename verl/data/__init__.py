"""From data files to prompt batches: readers, rendering, the resumable loader, micro-batch planning, data makers."""
