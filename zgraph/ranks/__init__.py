"""What ranks have in common: votes, heartbeats, where each is, random states."""
