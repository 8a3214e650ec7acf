"""Many instances, clients and faults under one clock: lives that a seed repeats."""
