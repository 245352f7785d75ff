"""MoeSumm: pretraining of a small backbone, training, evaluation and analysis."""
