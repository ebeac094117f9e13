"""What accuracy algorithms win back on trained models, by this package and by others."""
