"""The paper's tables and figures from our code, the paper's values beside ours."""
