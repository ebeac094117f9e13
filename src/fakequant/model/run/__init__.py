"""One recorded run of a model, and questions to it."""
