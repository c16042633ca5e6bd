"""BERT: pretraining, and everything around it."""
