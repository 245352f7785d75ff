"""Runs over many documents: sources and their formats, blocks, engines, and outputs that resume after an interruption.

Nothing here imports torch, Ray or pyarrow before it is used.
"""
