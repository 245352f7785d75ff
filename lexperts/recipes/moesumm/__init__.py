"""MoeSumm: training."""
