"""Train on Bank Marketing with NVIDIA FLARE, under a veil."""
