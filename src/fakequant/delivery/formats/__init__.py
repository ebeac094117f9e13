"""Formats of other programs, one file each; a file here is known without another change."""
