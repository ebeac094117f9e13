"""The page of a report: its first screen, its sections, its pictures and its style."""
