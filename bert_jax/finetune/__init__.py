"""Fine-tuning: task files, examples, features, training, scores and predictions."""
