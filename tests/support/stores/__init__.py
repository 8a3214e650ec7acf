"""A store in the process of the test, under a clock that the test owns."""
