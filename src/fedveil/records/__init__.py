"""Convert users' records to validated sources, which return batches."""
