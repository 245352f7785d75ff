"""What every command needs and no model does: it imports nothing first-party, and torch and transformers not at all."""
