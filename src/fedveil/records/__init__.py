"""Users' records: convert objects that contain records to validated sources, which return batches."""
