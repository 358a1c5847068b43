"""The paper's tables and figures, recomputed with our code, with the paper's values beside ours."""
