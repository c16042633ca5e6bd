"""Translation: the Transformer of "Attention Is All You Need" (Vaswani et al. 2017, arXiv 1706.03762), end to end."""
