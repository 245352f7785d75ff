"""Training and evaluation of ExHiRD, a keyphrase generator."""
