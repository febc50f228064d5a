"""Runtimes other than llama.cpp that this package ships."""
