"""`fedveil attack membership`: which records the other clients trained on."""
