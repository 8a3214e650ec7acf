"""RocksDB and every layout on disk."""
