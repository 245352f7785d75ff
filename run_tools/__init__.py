"""What every command needs and no model does: errors, YAML files, files that survive an interruption.

The lowest floor of the project: it imports nothing first-party, and torch and transformers not at all.
"""
