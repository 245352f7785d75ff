"""What every command needs and no model does: errors, options, YAML files, outputs that resume, runs over many documents.

The lowest floor of the project: it imports nothing first-party, and torch and transformers not at all.
"""
