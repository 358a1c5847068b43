"""What each protection costs, and what it protects from whom."""
