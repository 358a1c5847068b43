"""`fedveil attack membership`: infer which records the other clients trained on."""
