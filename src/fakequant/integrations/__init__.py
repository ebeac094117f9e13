"""What other libraries need to know of quantized models, one file each; imported where they are used."""
