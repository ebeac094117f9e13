"""The definition of results: formats, granularities, specifications and the reference, in plain torch."""
