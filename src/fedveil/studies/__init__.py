"""Comparisons and, later, the paper's tables and figures."""
