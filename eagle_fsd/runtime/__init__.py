"""How tensors are run: memory, kernels, recordings, times."""
