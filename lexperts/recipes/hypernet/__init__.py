"""The hypernetwork and its baselines: keyphrases, text classification, question answering."""
