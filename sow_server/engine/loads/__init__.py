"""Loads: rows that are staged out of sight, then published in one job."""
