"""The door of every RPC: who is let in, what a call may hold, and how an error becomes a status."""
