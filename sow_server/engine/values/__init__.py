"""Values and the rules about them: pure, without I/O."""
