"""The journal: every change in one total order."""
