"""Train on Bank Marketing with Flower, under a veil."""
