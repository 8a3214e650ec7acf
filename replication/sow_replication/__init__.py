"""Replication between instances: records with their versions, origins and stamps as they were applied (rules R1 to
R12).

This package knows `sow.v1`, the values of `sow_peering` and the protocols in `ports.py`. It knows nothing of the
server: the server joins the two.
"""
