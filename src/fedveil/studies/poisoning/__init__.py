"""`fedveil attack poisoning`: what hostile clients do to the model."""
