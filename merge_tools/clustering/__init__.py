"""Clusters definitions into domains: embeddings, balanced k-means, and the command `cluster`."""
