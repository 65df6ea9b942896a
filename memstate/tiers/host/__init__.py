"""Host memory: records by key, and the transfers between them and slots."""
