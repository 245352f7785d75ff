"""LM-Lexicon: from dictionaries to a mixture of experts that defines terms, and its scores."""
