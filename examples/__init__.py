"""Programs to read and to run. `make demo` runs `examples.demo`."""
