"""The paper's tables and figures as experiments, with its published numbers beside ours."""
