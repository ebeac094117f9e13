"""GGUF, the file format of llama.cpp: blocks of weights, the file around them, and the metadata of the model."""
