"""A run on disk: its configuration, folder and report page."""
