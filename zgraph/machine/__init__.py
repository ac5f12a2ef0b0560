"""What this machine and its links take, measured."""
