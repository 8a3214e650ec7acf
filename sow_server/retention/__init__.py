"""What is let go by itself: topics that nobody uses."""
