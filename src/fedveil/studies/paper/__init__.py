"""The paper's tables and figures, recomputed and compared with the paper's values."""
