"""The hypernetwork: keyphrases, text classification, question answering."""
