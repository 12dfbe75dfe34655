"""The pipelines, one file a kind."""
