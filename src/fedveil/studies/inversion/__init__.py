"""`fedveil attack inversion`: what the private classes look like."""
