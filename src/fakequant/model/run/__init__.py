"""One recorded run of a model, and queries on the recording."""
