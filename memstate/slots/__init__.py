"""Which slots are free, and who owns them. Knows no plane and no byte."""
