"""What the paper prints, and what we get for each figure."""
