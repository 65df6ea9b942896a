"""What a decode loop calls: the manager, and what it orchestrates."""
