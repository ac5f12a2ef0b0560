"""Where a program is cut into pipeline stages, and the stages that it becomes."""
