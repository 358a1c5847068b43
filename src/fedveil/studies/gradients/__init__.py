"""`fedveil attack gradients`: a victim's images from a gradient."""
