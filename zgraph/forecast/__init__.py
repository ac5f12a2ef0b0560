"""What a step will take at other sizes, worlds and plans."""
