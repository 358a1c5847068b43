"""Measure the cost of each protection, and which attackers it stops."""
