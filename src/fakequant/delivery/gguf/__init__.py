"""GGUF, the files of llama.cpp: blocks of weights, the file around them, and what it says of the model."""
