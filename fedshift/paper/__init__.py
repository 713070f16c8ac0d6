"""The paper's tables and figures as experiments, and comparisons with its published numbers."""
