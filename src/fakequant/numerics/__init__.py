"""What a result is: formats, granularities, specifications and the reference, in plain torch."""
