"""Experts for merging: dense language models that are fine-tuned on texts, chats or definitions."""
