"""What a slot is, and where its bytes are. Knows no free slot and no owner."""
