"""Records across another tensor-parallel split."""
