"""`fedveil attack gradients`: reconstruct a victim's images from a gradient."""
