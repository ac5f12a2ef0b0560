"""Programs on virtual ranks, compared with the plain model."""
