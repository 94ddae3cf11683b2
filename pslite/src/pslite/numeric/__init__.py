"""Arithmetic on weights and gradients: optimizers, norms, gradient sums, sparse rows, 16-bit encoding."""
