"""`fedveil audit`: what every attacker learns under each defence."""
