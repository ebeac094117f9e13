"""Check an exported file against the model, step by step and at its outputs."""
