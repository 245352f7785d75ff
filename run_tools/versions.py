"""Our version."""

__version__ = "0.2.0"  # of lexperts; setup.cfg reads it from here
