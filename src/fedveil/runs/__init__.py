"""A run on disk: its configuration, its folder, its page."""
