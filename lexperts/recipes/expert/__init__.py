"""Experts that are trained to be merged: `lexperts train expert`."""
