"""Parameters as shards on the user's own module."""
