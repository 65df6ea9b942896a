"""Tests, and what they share. A package, so that none that is installed under this name can stand in for it."""
