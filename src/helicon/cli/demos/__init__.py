"""The demos, one file a kind."""
