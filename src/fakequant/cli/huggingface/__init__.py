"""A folder of Hugging Face in place of a recipe, and how good its model is."""
