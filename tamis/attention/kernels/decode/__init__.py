"""One query per sequence over its caches."""
