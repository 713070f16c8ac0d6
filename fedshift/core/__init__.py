"""Named tensors, counter-based random numbers, names and atomic files; independent of federated learning."""
