"""Programs on virtual ranks, beside the plain model."""
