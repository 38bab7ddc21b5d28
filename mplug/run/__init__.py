"""One run before it trains: its config, hooks, mesh, folder and record."""
