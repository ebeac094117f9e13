"""Files that other people's engines load, with the codes that were trained, and back."""
