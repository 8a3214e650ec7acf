"""Replication between instances: records with their versions, origins and stamps, as they were applied (rules R1 to
R12).

Knows `sow.v1` and the protocols in `ports.py`, and nothing of the server: the server joins the two.
"""
