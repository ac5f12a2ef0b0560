"""What ranks have in common: votes, heartbeats, their progress, random states."""
