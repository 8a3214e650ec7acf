"""Servers and programs in processes of their own, and what stands between them and a test."""
