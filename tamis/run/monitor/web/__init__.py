"""The run as a web page: served on loopback while it is watched, and written to OUT/live.html while it trains."""
