"""What several tests share: builders, fakes and a server in a subprocess. Nothing here is installed."""
