"""Studies: comparisons, attacks, audits, and the paper's tables and figures."""
