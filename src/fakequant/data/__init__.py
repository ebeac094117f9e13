"""The data of users: batches, masks, progress, and errors that name the batch."""
