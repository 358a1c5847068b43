"""Bank Marketing over NVIDIA FLARE, under a veil."""
