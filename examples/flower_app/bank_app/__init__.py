"""Bank Marketing over Flower, under a veil."""
