"""What every hooked network shares."""
