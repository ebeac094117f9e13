"""The data of a user: batches, masks, progress, and errors that name the batch."""
