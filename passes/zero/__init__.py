"""ZeRO as passes: weights are gathered, gradients reduce-scattered."""
