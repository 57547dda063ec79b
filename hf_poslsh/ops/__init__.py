"""The operator: what is computed. It knows tensors and positions, nothing of transformers."""
