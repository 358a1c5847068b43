"""`fedveil attack inversion`: reconstruct what the private classes look like."""
