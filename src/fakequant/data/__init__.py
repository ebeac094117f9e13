"""What users pass in: batches, masks, progress, failures by name."""
