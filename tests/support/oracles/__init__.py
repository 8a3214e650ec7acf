"""What is right, said a second time and plainly, and checks against it."""
