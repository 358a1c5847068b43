"""Plain and veiled rounds in turn, over Flower."""
