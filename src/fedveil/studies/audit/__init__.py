"""`fedveil audit`: measure what every attacker learns under each defence."""
