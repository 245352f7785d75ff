"""MoeSumm: training and evaluation."""
